"""The engine: the same results compiled or not, one program per shape, and never silent."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from static import static_engine
from understudy.errors import InvalidSettings
from understudy.training import engine as module
from understudy.training.engine import Engine, choose_device


@dataclass(frozen=True)
class Descend:
    """A step with everything that steps have: a nested state, second derivatives, a 4-D tensor."""

    rate: float

    def __call__(self, state, target):
        points, velocity = state["points"], state["velocity"]
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            loss = ((leaf - target).square().sum() + leaf.cos().sum()) / 2
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (curve,) = torch.autograd.grad(slope.square().sum(), leaf)
        velocity = 0.5 * velocity + curve
        return {"points": points - self.rate * velocity, "velocity": velocity}


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, 3, 4, 4, generator=generator)
    return {"points": points, "velocity": torch.zeros_like(points)}, torch.ones(3, 4, 4)


@pytest.fixture
def static(monkeypatch):
    return static_engine(monkeypatch)


def equal(a, b):
    return all(torch.allclose(a[key], b[key]) for key in b)


@pytest.mark.parametrize("times", [1, 3])
def test_compiled_steps_equal_plain_ones(static, times):
    state, target = start()
    for _ in range(2):  # the second call replays
        ours = static.run(Descend(0.01), state, target, times=times)
        theirs = Engine().run(Descend(0.01), state, target, times=times)
        assert equal(ours, theirs)
        state = ours
    assert static.said == []


def test_a_tensor_that_is_given_twice_may_be_two_the_next_time(static):
    def step(a, b):
        return a + 10 * b

    one = torch.ones(3)
    assert static.run(step, one, one).tolist() == [11] * 3
    assert static.run(step, one, 2 * one).tolist() == [21] * 3
    assert len(static.compiled) == 1


def test_results_are_not_overwritten_by_the_next_call(static):
    state, target = start()
    first = static.run(Descend(0.01), state, target)
    kept = {key: value.clone() for key, value in first.items()}
    static.run(Descend(0.01), start(1)[0], target)
    assert equal(first, kept)


def test_an_input_changed_in_place_is_seen(static):
    state, target = start()
    static.run(Descend(0.01), state, target)
    target.mul_(2)
    assert equal(
        static.run(Descend(0.01), state, target), Engine().run(Descend(0.01), state, target)
    )


def test_equal_steps_share_a_program_and_others_do_not(static):
    state, target = start()
    for rate in (0.01, 0.01, 0.02):
        static.run(Descend(rate), state, target)
    assert len(static.compiled) == 2
    smaller = {key: value[:1] for key, value in state.items()}
    static.run(Descend(0.01), smaller, target)
    assert len(static.compiled) == 3


def test_resident_tensors_are_used_where_they_are(static):
    def look_up(table, places):
        return table[places] * 2

    table, places = torch.arange(10.0), torch.tensor([3, 1])
    assert static.run(look_up, places, resident=(table,)).tolist() == [6, 2]
    table[3] = 50  # no copy was taken
    assert static.run(look_up, places, resident=(table,)).tolist() == [100, 2]


def test_the_order_of_names_and_the_shape_of_residents_make_another_program(static):
    def difference(pair):
        first, second = pair.values()
        return first - second

    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert static.run(difference, {"a": two, "b": one}).item() == 1
    assert static.run(difference, {"b": one, "a": two}).item() == -1
    table, add = torch.arange(6.0), torch.ones(1)
    whole = static.run(sum_with, add, resident=(table,))
    assert (whole.item(), static.run(sum_with, add, resident=(table[:3],)).item()) == (16, 4)


def sum_with(table, more):
    return table.sum() + more


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so(static):
    def needs_a_number(x):
        return x * 2 if float(x.sum()) > 0 else x

    assert static.run(needs_a_number, torch.ones(2)).tolist() == [2, 2]
    assert static.run(needs_a_number, -torch.ones(2)).tolist() == [-1, -1]
    (line,) = static.said
    assert line.startswith("needs_a_number cannot be compiled (")
    assert "\n" not in line


def test_what_cannot_be_captured_runs_compiled_and_says_so(static, monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(module, "_Captured", refuse)
    state, target = start()
    assert equal(
        static.run(Descend(0.01), state, target, times=2),
        Engine().run(Descend(0.01), state, target, times=2),
    )
    (line,) = static.said
    assert "cannot be captured as a CUDA graph (RuntimeError: operation not permitted" in line
    assert "more" not in line


def test_a_new_function_at_every_call_is_not_compiled_for_ever(static):
    for number in range(module.MOST_PROGRAMS + 2):
        assert static.run(lambda x, n=number: x + n, torch.ones(1)).item() == 1 + number
    assert len(static.compiled) == len(static._programs) == module.MOST_PROGRAMS
    (line,) = static.said  # once, not at every call
    assert "programs are in use already" in line


def test_no_two_threads_get_one_stream(monkeypatch):
    """PyTorch's come from a pool, again and again."""
    handles = itertools.cycle([6, 7, 8, 9])
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=next(handles)), raising=False
    )
    own = module._own_stream
    with own() as first, own() as second:
        for _ in range(5):
            with own() as third:
                given = {stream.cuda_stream for stream in (first, second, third)}
                assert len(given) == 3
    assert not any(module._streams_in_use.values())


def test_threads_share_streams_before_one_that_captures_has_to(monkeypatch):
    handles = itertools.cycle([7, 8, 9])
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=next(handles)), raising=False
    )
    with contextlib.ExitStack() as threads:
        given = [threads.enter_context(module._own_stream()).cuda_stream for _ in range(4)]
        with module._own_stream(alone=True) as aside:
            assert aside.cuda_stream not in given
            for _ in range(4):
                assert threads.enter_context(module._own_stream()).cuda_stream in given
    assert sorted(Counter(given).values()) == [2, 2]
    assert not any(module._streams_in_use.values())


# On a CPU


@pytest.fixture
def on_cpu(static_but_for_a_gpu, monkeypatch):
    monkeypatch.setattr(module, "TO_COMPILE", 5 * module.EACH_OPERATION)
    monkeypatch.setattr(module, "COMPILER", "sh")  # is there; nothing is compiled by it
    monkeypatch.delenv("CXX", raising=False)
    return static_but_for_a_gpu


@pytest.fixture
def static_but_for_a_gpu(monkeypatch):
    is_static = Engine.is_static
    engine = static_engine(monkeypatch)
    monkeypatch.setattr(Engine, "is_static", is_static)
    return engine


def test_on_a_cpu_a_step_is_compiled_once_it_has_done_enough(on_cpu):
    state, target = start()
    mine = theirs = state
    for call in range(8):
        mine = on_cpu.run(Descend(0.01), mine, target)
        theirs = Descend(0.01)(theirs, target)
        assert equal(mine, theirs)
        assert len(on_cpu.compiled) == int(call >= 5)
    on_cpu.run(Descend(0.01), *start(), times=2)  # another program, which starts to count anew
    assert len(on_cpu.compiled) == 1
    assert on_cpu.said == []


def test_products_are_counted_and_repetitions_too(on_cpu):
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    maps, filters = torch.ones(1, 2, 6, 6), torch.ones(4, 2, 3, 3)

    def step(x):
        return x + (left @ right).sum() + torch.conv2d(maps, filters).sum()

    on_cpu.run(step, torch.ones(1), times=3)
    (work,) = on_cpu._work.values()
    products, operations = 3 * 5 * 7 + 4 * 4 * 4 * 2 * 9, 6  # two of these, two sums of them all
    assert work.each == work.done == 3 * (products + operations * module.EACH_OPERATION)
    assert work.to_compile == operations * module.TO_COMPILE  # however often it is repeated


def test_an_engine_beside_knows_nothing_of_the_shapes_of_another(on_cpu):
    on_cpu.run(torch.neg, torch.ones(3))
    assert on_cpu._work
    assert on_cpu.beside()._work == {}


def test_shapes_that_change_all_the_time_do_not_fill_memory(on_cpu):
    for length in range(module.MOST_PROGRAMS + 2):
        assert on_cpu.run(torch.neg, torch.ones(length)).sum() == -length
    assert len(on_cpu._work) <= module.MOST_PROGRAMS
    assert on_cpu.compiled == []


def test_without_a_compiler_steps_run_as_they_are_and_it_says_so_once(on_cpu, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(8):
        assert on_cpu.run(torch.neg, torch.ones(2)).tolist() == [-1, -1]
        assert on_cpu.run(torch.abs, -torch.ones(2)).tolist() == [1, 1]
    assert on_cpu.compiled == []
    (line,) = on_cpu.said
    assert line.startswith("there is no C++ compiler (no-such-compiler), so long work")


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", module.COMPILER)) is None, reason="there is no C++ compiler"
)
def test_what_a_compiler_makes_for_a_cpu_is_the_same_step(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "TO_COMPILE", 0)
    said = []
    engine = Engine(say=said.append)
    state, target = start()
    mine = theirs = state
    for _ in range(3):
        mine = engine.run(Descend(0.01), mine, target)
        theirs = Descend(0.01)(theirs, target)
        assert equal(mine, theirs)
    assert len(engine._programs) == 1
    assert said == []


def test_without_compilation_nothing_is_traced(static):
    static.compile = False
    state, target = start()
    static.run(Descend(0.01), state, target)
    assert static.compiled == []


def test_small_products_are_sums_and_large_ones_are_left_alone():
    torch.manual_seed(0)
    for left, right, rewritten in [
        ((100, 2048), (2048, 10), True),
        ((7, 1, 81), (7, 81, 128), True),
        ((7, 5, 1), (7, 1, 9), True),
        ((64, 64), (64, 64), False),
        ((7, 9, 1024), (7, 1024, 9), False),
    ]:
        a, b = torch.randn(left), torch.randn(right)
        found = module._product(a, b)
        assert (found is not NotImplemented) == rewritten
        if rewritten:
            assert torch.allclose(found, a @ b, atol=1e-3)


def test_devices():
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(InvalidSettings, match="there is no device 'tpu'"):
        choose_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidSettings, match="no CUDA device was found"):
            choose_device("cuda")


def test_compiled_code_is_kept_in_the_users_own_folder(tmp_path):
    """A process of its own: PyTorch chooses a shared one when its compiler is imported."""
    script = (
        "import torch; from understudy.training.engine import Engine; "
        "Engine().run(torch.neg, torch.ones(2)); "
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment["UNDERSTUDY_HOME"] = str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(tmp_path / "compiled")


def test_what_is_no_tensor_is_not_passed_over_in_silence(on_cpu):
    assert on_cpu.run(lambda x, _: -x, torch.ones(2), None).tolist() == [-1, -1]
    with pytest.raises(AttributeError):
        on_cpu.run(lambda x, y: x * y, torch.ones(2), 2.0)


def test_failure_that_is_hidden_by_its_own_report_is_told() -> None:
    hidden = ValueError("Attempt to trace generator")  # what PyTorch says of its own report
    hidden.__context__ = RuntimeError("out of shared memory\nmore of it")
    assert module._first_line(hidden) == "RuntimeError: out of shared memory"
    assert module._first_line(ValueError("plain")) == "ValueError: plain"
