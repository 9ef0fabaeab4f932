// Runs an AOTInductor package: no Python in this process, and nothing of insum_ops registered.
// program PACKAGE DEVICE INPUTS OUTPUTS: both files hold lists of lists of tensors, one list for each call, as torch.save
// writes them; DEVICE is where the package runs.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const c10::Device device(argv[2]);
  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  c10::List<c10::List<at::Tensor>> results;
  const c10::IValue calls = torch::jit::pickle_load(bytes);
  for (const c10::IValue& call : calls.toListRef()) {
    std::vector<at::Tensor> inputs;
    for (const c10::IValue& given : call.toListRef()) inputs.push_back(given.toTensor().to(device));
    c10::List<at::Tensor> values;
    for (const at::Tensor& value : package.run(inputs)) values.push_back(value.to(at::kCPU));
    results.push_back(values);
  }
  const std::vector<char> written = torch::jit::pickle_save(results);
  std::ofstream(argv[4], std::ios::binary).write(written.data(), static_cast<std::streamsize>(written.size()));
}
