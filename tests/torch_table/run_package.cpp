// Runs an AOTInductor package of a scattered sum: no Python in this process, and nothing of insum_ops registered.
// What it prints is sum over e of X[source[e]] * (e + 1), added to row target[e], for n rows of two columns.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

int main(int argc, char** argv) {
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  for (int at = 2; at < argc; ++at) {
    const int64_t n = std::stoll(argv[at]);
    const at::Tensor X = at::arange(2 * n, at::kFloat).view({n, 2});
    const at::Tensor edge = at::arange(3 * n, at::kLong);
    const at::Tensor index = at::stack({edge.remainder(n), (7 * edge).remainder(n)}, 1);
    const at::Tensor weight = (edge + 1).to(at::kFloat);
    const std::vector<at::Tensor> results = package.run({X, weight, index});
    const at::Tensor Y = results.at(0).contiguous();
    for (int64_t i = 0; i < Y.numel(); ++i) std::cout << Y.data_ptr<float>()[i] << " ";
    std::cout << "\n";
  }
}
