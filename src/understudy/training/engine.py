"""The engine: runs pure functions of tensors, compiled where that pays.

A step of training is a few hundred small kernels. Launched one by one they leave a GPU idle most of
the time, so there the engine traces the function once (`make_fx`, which sees through `vmap` and
double backward), compiles the trace, and captures it as a CUDA graph: one launch per call. Nothing
waits for the GPU, so the host runs ahead and prepares what comes next.

On a CPU most of the time goes to maps that are written only to be read once. Compiled, the kernels
between two products are one; but compiling takes as long as thousands of small steps. So there a
function runs plainly until it has done as much as its compiler needs, counted in products, not in
seconds: which call is the first compiled one must not depend on what else the machine does.

The function must be pure: all that changes between calls is an argument, and shapes stay the same.
What it takes from elsewhere is fixed by the first call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from understudy.errors import InvalidSettings
from understudy.files import home

LARGEST_COMBINED = 2**24
"""Values of the largest tensor up to which kernels are combined: it slows large ones."""
WARM_UP_CALLS = 3
EACH_OPERATION = 2 * 10**6
"""What an operation costs on a CPU beside its products, counted as such."""
TO_COMPILE = 25 * 10**8
"""What compiling an operation for a CPU costs, counted in products: some thirty milliseconds."""
MOST_PROGRAMS = 32
"""Programs kept; a function that is a new object at every call would be compiled at every call."""
COMPILER = "clang++" if sys.platform == "darwin" else "g++"
"""What torch compiles for a CPU with, unless CXX says otherwise."""

MOST_STREAMS = 64
"""Streams that are looked at for one that is free."""

Step = Callable[..., Any]
Say = Callable[[str], None]


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one.

    Raises:
        InvalidSettings: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise InvalidSettings(f"there is no device '{name}', expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSettings("no CUDA device was found; pass --device cpu or --device auto")
    return torch.device(name)


@dataclass
class Engine:
    """Run pure functions of tensors on one device.

    Args:
        device: where the tensors are.
        compile: whether to compile, and capture on a GPU; False to debug.
        say: where to tell the user that something could not be made fast.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = True
    say: Say = print
    _programs: dict[Hashable, Step] = field(default_factory=dict, repr=False)
    _compiled: dict[Hashable, Step] = field(default_factory=dict, repr=False)
    _work: dict[Hashable, _Work] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        # Before PyTorch's compiler is imported, which else chooses a folder that all users share.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "compiled"))

    def beside(self) -> Engine:
        """Return an engine for another thread: its own buffers and graphs, the same compilations.

        What two such engines run, each on a stream of its own, a GPU does at the same time.
        """
        return replace(self, _programs={}, _work={})

    @contextlib.contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Run what this thread does on a stream of its own."""
        if self.device.type != "cuda":
            yield
            return
        with _own_stream() as stream:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield

    @property
    def is_static(self) -> bool:
        """Whether functions are compiled at once, so that shapes should stay as they are."""
        return self.compile and self.device.type == "cuda"

    def run(self, step: Step, *args: Any, times: int = 1, resident: Sequence[Tensor] = ()) -> Any:
        """Return `step(*resident, *args)`.

        Args:
            step: the function; arguments and result are tensors, or nested in lists and dicts.
            args: copied into the program's buffers at every call.
            times: repeat: the result is the first argument of the next call.
            resident: tensors that are used where they are, and are the same at every call.
        """
        if not self.compile:
            return _plainly(step, times, resident, args)
        leaves, structure = pytree.tree_flatten(args)
        if any(leaf is None for leaf in leaves):  # nothing public
            return _plainly(step, times, resident, args)
        places = tuple(tensor.data_ptr() for tensor in resident)
        key = (step, times, places, structure, *map(_kind, (*resident, *leaves)))
        if key not in self._programs:
            if not self.is_static and not self._is_worth_it(key):
                return self._counted(key, step, times, resident, args)
            if len(self._programs) == MOST_PROGRAMS:
                self._say_once(
                    f"{_name(step)} is not compiled: {MOST_PROGRAMS} programs are in use already; "
                    "is it a new function at every call?"
                )
                return _plainly(step, times, resident, args)
            with self._lock:  # one thread traces, compiles or captures at a time
                self._programs[key] = self._program(step, times, resident, args)
            self._work.pop(key, None)
        return self._programs[key](*args)

    def _is_worth_it(self, key: Hashable) -> bool:
        """Whether a function has done enough plainly, and there is what compiles it."""
        work = self._work.get(key)
        if work is None or work.done < work.to_compile:
            return False
        wanted = os.environ.get("CXX", COMPILER)
        if not _is_there(wanted):
            self._say_once(
                f"there is no C++ compiler ({wanted}), so long work on this CPU takes about twice "
                "as long as with one; install it to change that"
            )
            return False
        return True

    def _counted(
        self,
        key: Hashable,
        step: Step,
        times: int,
        resident: Sequence[Tensor],
        args: tuple[Any, ...],
    ) -> Any:
        """Run `step` plainly, and keep count of what it does."""
        if work := self._work.get(key):
            work.done += work.each
            return _plainly(step, times, resident, args)
        if len(self._work) == MOST_PROGRAMS:  # shapes that change at every call
            self._work.clear()
        with _Count() as count:
            result = _plainly(step, times, resident, args)
        each = count.products + EACH_OPERATION * count.operations
        self._work[key] = _Work(each, each, TO_COMPILE * count.operations // times)
        return result

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def _program(
        self, step: Step, times: int, resident: Sequence[Tensor], args: tuple[Any, ...]
    ) -> Step:
        def plainly(*args: Any) -> Any:
            return _plainly(step, times, resident, args)

        name = _name(step)
        leaves, structure = pytree.tree_flatten(args)
        key = (step, structure, *map(_kind, (*resident, *leaves)))
        try:
            if key not in self._compiled:
                with _fast_arithmetic() if self.is_static else contextlib.nullcontext():
                    self._compiled[key] = _compiled(step, resident, args)
            compiled = self._compiled[key]
        except Exception as error:
            self.say(f"{name} cannot be compiled ({_first_line(error)}); it runs as it is, slowly")
            return plainly

        def repeated(*args: Any) -> Any:
            return _plainly(compiled, times, resident, args)

        if not self.is_static:
            return repeated
        try:
            with _fast_arithmetic():
                return _Captured(repeated, args)
        except Exception as error:
            self.say(
                f"{name} cannot be captured as a CUDA graph ({_first_line(error)}); it runs "
                "compiled but launched kernel by kernel"
            )
            return repeated


@dataclass
class _Work:
    """What a function does plainly, in products: in each call, so far, and before it is compiled.

    As much before as compiling takes, so that in all it never takes twice as long as the better of
    both would have.
    """

    each: int
    done: int
    to_compile: int


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations that run meanwhile, and products of matrices and convolutions in them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if count := flop_registry.get(func.overloadpacket):
            self.products += count(*args, **(kwargs or {}), out_val=result) // 2  # and sums
        return result


_streams_in_use: Counter[int] = Counter()
_streams_lock = threading.Lock()
ALONE = 10**6
"""How much a stream that nobody else may have weighs."""


@contextlib.contextmanager
def _own_stream(*, alone: bool = False) -> Iterator[Any]:
    """Give out a stream that no other thread of ours works on, if any is left.

    PyTorch hands out the same 32 again and again. One stays free for a graph to be captured on
    alone; beyond the others, threads share.
    """
    with _streams_lock:
        drawn = (torch.cuda.Stream() for _ in range(MOST_STREAMS))  # type: ignore[no-untyped-call]
        found = {one.cuda_stream: one for one in drawn}
        uses = {handle: _streams_in_use[handle] for handle in found}
        if not alone and list(uses.values()).count(0) == 1 and len(uses) > 1:
            uses = {handle: count for handle, count in uses.items() if count}
        handle = min(uses, key=lambda handle: uses[handle])
        _streams_in_use[handle] += (weight := ALONE if alone else 1)
    try:
        yield found[handle]
    finally:
        with _streams_lock:
            _streams_in_use[handle] -= weight


@contextlib.contextmanager
def _fast_arithmetic() -> Iterator[None]:
    """While kernels are chosen, let float32 products use tensor cores (10 bits of mantissa)."""
    products, search = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, search.benchmark
    products.allow_tf32 = search.benchmark = True
    try:
        yield
    finally:
        products.allow_tf32, search.benchmark = before


def _plainly(step: Step, times: int, resident: Sequence[Tensor], args: tuple[Any, ...]) -> Any:
    result = step(*resident, *args)
    for _ in range(times - 1):
        result = step(*resident, result, *args[1:])
    return result


def _compiled(step: Step, resident: Sequence[Tensor], args: tuple[Any, ...]) -> Step:
    """Trace `step` at the shapes of its arguments and compile the trace."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, structure = pytree.tree_flatten((*resident, *args))
    result_structure: pytree.TreeSpec | None = None

    def flat(*leaves: Tensor) -> list[Tensor]:
        nonlocal result_structure
        result = step(*pytree.tree_unflatten(leaves, structure))
        flattened, result_structure = pytree.tree_flatten(result)
        return [_laid_out(tensor.detach()) for tensor in flattened]

    kept = len(resident)  # as they are: a copy of all records would take longer than the step
    distinct = _distinct([*leaves[:kept], *map(_laid_out, leaves[kept:])])
    traced = make_fx(flat, decomposition_table=SMALL_PRODUCTS)(*distinct)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    traced.to(leaves[0].device)  # constants too: a captured graph cannot copy them
    if leaves[0].is_cuda:
        is_small = max(_values(node) for node in traced.graph.nodes) <= LARGEST_COMBINED
        options: dict[str, Any] = {"combo_kernels": is_small}
    else:
        options = {"compile_threads": 1}  # a pool of processes would outlive an interrupt
    compiled = torch.compile(traced, fullgraph=True, dynamic=False, options=options)

    def call(*args: Any) -> Any:
        with torch.no_grad():
            leaves = pytree.tree_leaves(args)
            results = compiled(*leaves[:kept], *map(_laid_out, leaves[kept:]))
        return pytree.tree_unflatten(results, cast(pytree.TreeSpec, result_structure))

    call(*distinct)  # compile now, where a failure is understood
    return call


@cache
def _is_there(program: str) -> bool:
    return shutil.which(program) is not None


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def _values(node: Any) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) and node.op == "call_function" else 0


def _laid_out(tensor: Tensor) -> Tensor:
    """Lay a tensor out as convolutions on a GPU want it: channels last."""
    return tensor.contiguous(
        memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
    )


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy a tensor that is there twice: the trace would take the two for one, in every call."""
    found: list[Tensor] = []
    for tensor in tensors:
        found.append(tensor.clone() if any(tensor is other for other in found) else tensor)
    return found


def _product(left: Tensor, right: Tensor) -> Any:
    """Multiply (..., m, k) by (..., k, n) as sums where a matrix product would starve a GPU.

    That is: a vector is involved, or the result is small and the sums are long. As sums they fuse
    with what comes before and after.
    """
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    is_vector = min(m, n) == 1 and left.dtype in (torch.float32, torch.float64)
    is_long = left.ndim == 2 and m * n <= 1024 and k >= 512 and left.dtype == torch.float32
    if not (k == 1 or is_vector or is_long):
        return NotImplemented
    return (left.unsqueeze(-2) * right.transpose(-1, -2).unsqueeze(-3)).sum(-1)


def _product_and_sum(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    product = _product(left, right)
    return product if product is NotImplemented else bias + product


SMALL_PRODUCTS: dict[Any, Any] = {
    torch.ops.aten.mm.default: _product,
    torch.ops.aten.bmm.default: _product,
    torch.ops.aten.addmm.default: _product_and_sum,
}


class _Captured:
    """A function as a CUDA graph, with buffers for its arguments."""

    def __init__(self, function: Step, args: tuple[Any, ...]) -> None:
        self._function = function  # holds what the graph reads where it is
        leaves, structure = pytree.tree_flatten(args)
        self._inputs = [_laid_out(leaf).clone() for leaf in leaves]
        self._seen: list[tuple[Any, int]] = [(None, 0)] * len(leaves)
        buffers = pytree.tree_unflatten(self._inputs, structure)
        self._graph = torch.cuda.CUDAGraph()
        with _own_stream(alone=True) as aside:
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP_CALLS):
                    function(*buffers)
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(self._graph, stream=aside, capture_error_mode="thread_local"):
                self._results = function(*buffers)

    def __call__(self, *args: Any) -> Any:
        buffers, fresh = [], []
        for place, leaf in enumerate(pytree.tree_leaves(args)):
            before, version = self._seen[place]
            if before is not leaf or version != leaf._version:  # compiled steps often share inputs
                buffers.append(self._inputs[place])
                fresh.append(leaf)
                self._seen[place] = leaf, leaf._version
        _copy(buffers, fresh)
        self._graph.replay()
        # The next replay overwrites the graph's own results.
        results, structure = pytree.tree_flatten(self._results)
        copies = [torch.empty_like(result) for result in results]
        _copy(copies, results)
        return pytree.tree_unflatten(copies, structure)


def _copy(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into buffers, those of one type in one launch: a step has dozens of each."""
    kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for buffer, value in zip(buffers, values, strict=True):
        kinds.setdefault(value.dtype, []).append((buffer, value))
    for pairs in kinds.values():
        torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])


def _name(step: Step) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def _first_line(error: BaseException) -> str:
    """Say in a line what failed; what failed first, where failing to report it hides that."""
    while "Attempt to trace generator" in str(error) and error.__context__:
        error = error.__context__  # of PyTorch's own report, under its own compiler
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
