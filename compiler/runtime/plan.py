"""A launch plan: the steps of a recorded run as one Python function, which replays them on other tensors.

The function is written out as text, a line for each step, since a loop over steps would cost more than the steps. It
begins with the guards; if one fails it returns None, and its caller works the call out anew. A plan keeps no
state of a call, so threads share it, and it holds the tensors that are pinned, not who owns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...formats.guard import address_expression, address_of, change_expression
from ...formats.torch_state import HALF
from ..binding import LengthClass
from .enqueue import LaunchCall
from .plan_steps import ALLOCATE, Length, Steps, reads_of, touched_by_torch
from .recording import Call, Launch, Range, Slice, Slot, Step, slots_in

__all__ = ["EPOCH", "Epoch", "Plan", "Services", "plan_of"]


class Epoch:
    """A count that tuning increases; plans of an earlier epoch, which hold other kernels, are not replayed."""

    number = 0


EPOCH = Epoch()


@dataclass(frozen=True)
class Services:
    """The functions that a replay calls to check its guards and to allocate; `plan_cache` provides them."""

    is_interpreted: bool  # kernels take tensors, not pointers
    has_several_devices: bool
    is_capturing: Callable[[], bool]
    ranges_of: Callable[..., list[tuple[int, int]]]  # of several tensors
    ascends: Callable[[Tensor], bool]  # whether a tensor's numbers do
    range_expression: Callable[..., str]  # whether an input of a fixed layout has a known range, as text
    rounds_sums: Callable[[torch.dtype], bool]
    precision: Callable[[], str]  # of float32 products, by which kernels differ
    default_dtype: Callable[[], torch.dtype]  # which a product of numbers has
    is_deterministic: Callable[[], bool]
    misaligned: Callable[[Sequence[int]], int]
    empty_on: Callable[[torch.device], Callable[..., Tensor]]
    current_device: Callable[[], int]


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Steps under their guards; `replay` takes the inputs, and returns None if a guard fails."""

    steps: tuple[Step, ...]
    ranges: tuple[Range, ...]
    pinned: Mapping[int, Tensor]
    result: Any
    source: str
    replay: Callable[..., Any]
    is_launched: bool  # it allocates, and kernels do the rest: there is nothing to record gradients of
    divisor: int  # of lengths that vary, which its kernels rely on; 1 for none

    def __str__(self) -> str:
        return self.source


def plan_of(steps: Steps, services: Services, lengths: Sequence[Any] = ()) -> Plan | None:
    """Return the plan of recorded steps; None if a pinned index tensor does not tell when it changes.

    `lengths` says what the first dimension of each input must be, then each number: a number, another one's place as a
    Length, or any of a LengthClass. None is one that the caller of the plan has compared.
    """
    writer = _Writer(steps, services, lengths)
    writer.write_lengths()
    if not writer.write_guards():
        return None
    writer.write_steps()
    source = writer.source()
    scope: dict[str, Any] = {}
    exec(compile(source, "<launch plan>", "exec"), scope)
    # in cells, not in the scope, which would hold the function that holds the scope
    replay = scope["plan"](**writer.constants)
    is_launched = all([step.function is ALLOCATE for step in steps.steps if writer.is_called(step)])
    known = [*lengths, *[derived.known for derived in writer.derived]]
    divisor = math.prod([length.divisor for length in known if isinstance(length, LengthClass)])
    return Plan(steps.steps, steps.ranges, steps.pinned, steps.result, source, replay, is_launched, divisor)


class _Writer:
    """The text of one replay, and the objects that it names."""

    def __init__(self, steps: Steps, services: Services, lengths: Sequence[Any]) -> None:
        self.plan, self.services, self.lengths = steps, services, lengths
        # where lengths are fixed, so are those that are made of them
        self.derived = [each for each in steps.derived if any([isinstance(part, Length) for part in each.args])]
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.names = {number: f"x{number}" for number in range(steps.inputs)}
        self.pointers: dict[int, str] = {}
        self.streams: dict[str, str] = {}  # the variables of streams, by what asks for them
        for number, tensor in steps.pinned.items():
            self.names[number] = self.constant(tensor, "k")
            if not services.is_interpreted:
                self.pointers[number] = str(address_of(tensor))
        self.is_view_only = set() if services.is_interpreted else self._view_only()

    def constant(self, value: object, letter: str = "c") -> str:
        """Return the name of an object in the text; the first request gives it one that begins with `letter`."""
        for name, existing in self.constants.items():
            if existing is value:
                return name
        name = f"{letter}{len(self.constants)}"
        self.constants[name] = value
        return name

    def source(self) -> str:
        """Return the text of a function that takes the constants and returns `replay`."""
        parameters = self.parameters()
        head = f"def replay({', '.join(parameters)}):"
        lines, device = [head, *[f"    {line}" for line in self.lines]], self.plan.device
        if self.services.has_several_devices and device.type == "cuda":
            current, on = self.constant(self.services.current_device), self.constant(torch.cuda.device)
            lines[0] = head.replace("replay", "replay_here")
            lines += [
                head,
                f"    if {current}() == {device.index}:",
                f"        return replay_here({', '.join(parameters)})",
                f"    with {on}({device.index}):",
                f"        return replay_here({', '.join(parameters)})",
            ]
        return "\n    ".join([f"def plan({', '.join(self.constants)}):", *lines, "return replay"])

    def parameters(self) -> list[str]:
        """Return the arguments of `replay`: the inputs, then the numbers."""
        count = self.plan.inputs
        return [*[f"x{at}" for at in range(count)], *[f"n{at}" for at in range(count, len(self.lengths))]]

    def miss_if(self, condition: str) -> None:
        """Write a guard, by which `replay` returns None if the condition holds."""
        self.lines += [f"if {condition}:", "    return None"]

    def write_lengths(self) -> None:
        """Write the guards on lengths, which are the first: of several plans behind one guard most miss by these."""
        for at, length in enumerate(self.lengths):
            if length is None:
                continue
            if at < self.plan.inputs:
                self.lines.append(f"n{at} = x{at}.shape[0]")
            self.miss_unless(at, length)
        for at, derived in enumerate(self.derived, len(self.lengths)):
            self.lines.append(f"n{at} = {self.constant(derived.function, 'f')}({', '.join(map(str, derived.args))})")
            self.miss_unless(at, derived.known)

    def miss_unless(self, at: int, length: Any) -> None:
        """Write the guard on one length: that it is a number, or another length, or of a class."""
        if isinstance(length, LengthClass):
            is_divided = f" or n{at} % {length.divisor}" if length.divisor > 1 else ""
            self.miss_if(f"not {length.least} <= n{at} <= {length.most}{is_divided}")
        else:
            self.miss_if(f"n{at} != {length}")

    def write_guards(self) -> bool:
        """Write all other guards; return False if a pinned index tensor does not tell when it changes."""
        plan, services = self.plan, self.services
        epoch = self.constant(EPOCH)
        self.miss_if(f"{epoch}.number != {EPOCH.number}")
        if plan.is_for_eager_calls:
            self.miss_if(f"{self.constant(services.is_capturing)}()")
        if plan.device.type != "cpu" or services.is_interpreted:  # a CPU's operations ask for them themselves
            if torch.float32 in plan.dtypes:
                self.miss_if(f"{self.constant(services.precision)}() != {services.precision()!r}")
            self.miss_if(f"{self.constant(services.is_deterministic)}() is not {services.is_deterministic()}")
        for dtype in plan.dtypes.intersection(HALF):
            rounding = f"{self.constant(services.rounds_sums)}({self.constant(dtype)})"
            self.miss_if(f"{rounding} is not {services.rounds_sums(dtype)}")
        if not plan.has_values:
            self.miss_if(f"{self.constant(services.default_dtype)}() is not {self.constant(services.default_dtype())}")
        for number, tensor in plan.pinned.items():
            if id(tensor) in plan.owned:
                continue
            name = self.names[number]
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                if not services.is_interpreted:  # kernels are given its address
                    self.miss_if(change_expression(name, tensor, is_version_compared=False))
                continue
            if tensor.is_inference():
                return False
            self.miss_if(change_expression(name, tensor, is_version_compared=True))
        # of the inputs that kernels take, their launches ask for addresses themselves
        lives = plan.filled if plan.device.type == "cpu" else plan.filled & touched_by_torch(plan.steps)
        if lives:
            self.miss_if(f"not ({' and '.join([self.pointer(at) for at in sorted(lives)])})")
        self.write_ranges()
        for check in plan.checks:
            self.miss_if(f"{self.constant(check.function)}(x{check.slot.number}) is not {check.answer}")
        return True

    def write_ranges(self) -> None:
        """Write the guards on index ranges; those of all tensors that are new are read at once."""
        plan, services = self.plan, self.services
        checked = [each for each in plan.ranges if each.slot.number < plan.inputs]
        numbers = list(dict.fromkeys(each.slot.number for each in checked))
        if not numbers:
            return
        bounds = "".join(f"(low{number}, high{number}), " for number in numbers)
        ordered = sorted({numbers.index(each.slot.number) for each in checked if each.ascends is not None})
        named = [f"x{number}" for number in numbers] + ([f"ordered={ordered}"] if ordered else [])
        orders = {each.slot.number: each.ascends for each in checked if each.ascends is not None}
        remembered = "".join(f"r{number}.values, " for number in numbers)
        conditions = [
            services.range_expression(
                f"x{number}", self.pointer(number), f"r{number}", self.layout(number), orders.get(number)
            )
            for number in numbers
        ]
        self.lines += [f"if {' and '.join(conditions)}:", f"    {bounds}= {remembered}", "else:"]
        self.lines.append(f"    {bounds}= {self.constant(services.ranges_of)}({', '.join(named)})")
        for number, order in orders.items():
            self.lines.append(f"    if {self.constant(services.ascends)}(x{number}) is not {order}:")
            self.lines.append("        return None")
        for each in checked:
            number = each.slot.number
            self.miss_if(f"high{number} >= {each.extent} or (low{number} < 0) is not {each.is_padded}")

    def layout(self, number: int) -> str:
        """Return the text of the shape, strides and dtype of an input whose range is asked."""
        layout = self.plan.ranged[number]
        if number >= len(self.lengths) or not isinstance(self.lengths[number], (Length, LengthClass)):
            return self.constant(layout)
        (_, *sizes), strides, dtype = layout
        return f"((n{number}, {''.join(f'{size}, ' for size in sizes)}), {self.text(strides)}, {self.text(dtype)})"

    def _view_only(self) -> set[int]:
        """Return the views that kernels alone read: they need no tensor, only an address."""
        read_as_tensors = {slot.number for slot in slots_in(self.plan.result)}
        views = set[int]()
        for step in reversed(self.plan.steps):
            if isinstance(step, Call):
                results = {slot.number for slot in slots_in(step.results)}
                if len(step.views) == len(results) and not results & read_as_tensors:
                    views |= results
                else:
                    read_as_tensors |= {slot.number for slot in reads_of(step)}
        return views

    def write_steps(self) -> None:
        """Write a line for each step, and the result; a tensor is freed after the last step that needs it."""
        last = self._last_uses()
        for at, step in enumerate(self.plan.steps):
            if isinstance(step, Launch):
                self.write_launch(step)
            elif self.is_called(step):
                self.write_call(step)
            else:
                for view in step.views:
                    self.pointers[view.slot.number] = _sum(self.pointer(view.base.number), view.offset)
            done = [self.names[number] for number in last.get(at, ()) if number in self.names]
            if done and at + 1 < len(self.plan.steps):
                self.lines.append(" = ".join([*done, "None"]))  # memory that the next step may have
        self.lines.append(f"return {self.text(self.plan.result)}")

    def is_called(self, step: Step) -> TypeGuard[Call]:
        """Return whether a replay calls a step's function: it launches a kernel, and of some views needs no tensor."""
        return isinstance(step, Call) and not (step.views and step.views[0].slot.number in self.is_view_only)

    def _last_uses(self) -> dict[int, list[int]]:
        """Return the tensors that no step after a given one reads, as a tensor or by an address into it."""
        results = {slot.number for step in self.plan.steps if isinstance(step, Call) for slot in slots_in(step.results)}
        returned = {slot.number for slot in slots_in(self.plan.result)}
        views = [view for step in self.plan.steps if isinstance(step, Call) for view in step.views]
        bases = {view.slot.number: view.base.number for view in views}
        last: dict[int, int] = {}
        for at, step in enumerate(self.plan.steps):
            for slot in [*reads_of(step), *(slots_in(step.results) if isinstance(step, Call) else ())]:
                number: int | None = slot.number
                while number is not None:
                    last[number] = at
                    number = bases.get(number)
        numbers_by_step: dict[int, list[int]] = {}
        for number, at in last.items():
            if number in results and number not in returned and number >= self.plan.inputs:
                numbers_by_step.setdefault(at, []).append(number)
        return numbers_by_step

    def pointer(self, number: int) -> str:
        """Return the expression of a tensor's address; the first request writes the line that reads it."""
        pointer = self.pointers.get(number)
        if pointer is None:
            pointer = self.pointers[number] = f"p{number}"
            self.lines.append(f"p{number} = {address_expression(self.names[number])}")
        return pointer

    def write_call(self, step: Call) -> None:
        """Write the line of a torch function; memory is allocated without the dispatcher if `empty_on` can."""
        args = ", ".join([*map(self.text, step.args), *[f"{key}={self.text(value)}" for key, value in step.kwargs]])
        function = step.function
        if function is ALLOCATE and dict(step.kwargs).keys() == {"dtype", "device"}:
            named = dict(step.kwargs)
            function = self.services.empty_on(named["device"])
            args = ", ".join([*map(self.text, step.args), self.text(named["dtype"])])
        elif function in (Tensor.as_strided, torch.as_strided) and step.views:
            (view,) = step.views  # it begins where its base does in this call, not where that began when recorded
            start = f"{self.names[view.base.number]}.storage_offset() + {view.offset // view.itemsize}"
            args = f"{', '.join(map(self.text, step.args[:3]))}, {start}"
        self.lines.append(f"{self.target(step)}{self.constant(function, 'f')}({args})")

    def target(self, step: Call) -> str:
        """Return the left side of a call's line, nothing if its result is not needed."""
        if step.has_effect or not slots_in(step.results):
            return ""
        return f"{self.bound(step.results)} = "

    def bound(self, results: Any) -> str:
        """Return the variables that results are bound to, in the structure that the function returns."""
        if isinstance(results, Slot):
            if results.number not in self.names:
                self.names[results.number] = f"v{results.number}"
            return self.names[results.number]
        if isinstance(results, tuple):
            return f"({', '.join([self.bound(part) for part in results])},)"
        return "_"

    def text(self, value: Any) -> str:
        """Return an argument as the text has it: a variable, a literal, or the name of a constant."""
        if isinstance(value, Slot):
            return self.names[value.number]
        if isinstance(value, Slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.text, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if type(value) in (int, bool, type(None), str, Length) or (type(value) is float and math.isfinite(value)):
            return str(value) if isinstance(value, Length) else repr(value)
        return self.constant(value)

    def write_launch(self, step: Launch) -> None:
        """Write the lines of a kernel's launch; the kernel is chosen by which of the pointers are aligned."""
        services = self.services
        fixed_blocks = [-(-extent // block) for extent, block in step.grid if not isinstance(extent, Length)]
        varying = [f"-(-({extent}) // {block})" for extent, block in step.grid if isinstance(extent, Length)]
        programs = " * ".join([str(math.prod([step.parts, *fixed_blocks])), *varying])
        numbers = [str(number) for number in step.numbers]
        kernels = self.constant(step.kernels)
        if services.is_interpreted:
            tensors = [self.names[slot.number] for slot in step.tensors]
            usual = self.constant(step.kernels[step.unaligned])
            self.lines.append(f"{usual}({programs}, [{', '.join([*tensors, *numbers])}])")
            return
        addresses = [self.pointer(slot.number) for slot in step.tensors]
        moving = sorted({address for address in addresses if not address.isdigit()})
        fixed = services.misaligned([int(address) if address.isdigit() else 0 for address in addresses])
        launch = self.launch_line(step, programs, [*addresses, *numbers])
        if not moving:
            self.lines.append(launch)
            return
        bits = " | ".join([f"({address})" if "+" in address else address for address in moving])
        bases = " and ".join(sorted({address.partition(" ")[0] for address in moving}))
        indent = ""
        if fixed == step.unaligned:  # the usual case: what moves is aligned
            self.lines += [f"if not ({bits}) & 15 and {bases}:", f"    {launch}", "else:"]
            indent = "    "
        self.lines += [
            f"{indent}a = [{', '.join([*addresses, *numbers])}]",
            f"{indent}kernel = {kernels}.get({self.constant(services.misaligned)}(a[:{len(addresses)}]))",
            f"{indent}if kernel is None or not ({bases}):",  # memory may have been given back
            f"{indent}    return None",
            f"{indent}kernel({programs}, a)",
        ]

    def launch_line(self, step: Launch, programs: str, arguments: Sequence[str]) -> str:
        """Return the line that launches the kernel of a recorded run: the call of Triton's C function, if it is known.

        The stream is asked for once, by the first such line.
        """
        runner = step.kernels[step.unaligned]
        call: LaunchCall | None = getattr(runner, "call", None)
        if call is None:
            return f"{self.constant(runner)}({programs}, [{', '.join(arguments)}])"
        stream = f"{self.constant(call.stream_of)}({call.device})"
        if stream not in self.streams:
            self.streams[stream] = f"s{len(self.streams)}"
            self.lines.append(f"{self.streams[stream]} = {stream}")
        passed = [f"({', '.join(arguments)},)"] if call.is_packed else arguments
        fixed = [self.text(value) for value in call.fixed]
        return f"{self.constant(call.function)}({programs}, 1, 1, {', '.join([self.streams[stream], *fixed, *passed])})"


def _sum(pointer: str, offset: int) -> str:
    """Return the expression of an address `offset` bytes behind another one."""
    if pointer.isdigit():
        return str(int(pointer) + offset)
    return pointer if offset == 0 else f"{pointer} + {offset}"
