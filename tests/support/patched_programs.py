"""Programs that list the patches in a process of their own, for the tests of each framework's patches."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_each, run_ranks

__all__ = ["IN_A_FORK", "IN_THREADS", "fresh", "page_has"]

ROOT = Path(__file__).resolve().parents[2]

#: Four threads make the first DTensor of a process at once. A function ``make()`` that gives a tensor comes before it.
IN_THREADS = """
import threading, time
import hyper_parallel as hp
from hyper_parallel.platform import get_platform_for_device, patching
replace = patching.PatchSet._replace

def slow(*given):
    time.sleep(0.3)  # so that the others come meanwhile
    return replace(*given)

patching.PatchSet._replace = slow
platform = get_platform_for_device("cpu")
init, inits = platform.init_process_group, []

def slow_init():
    inits.append(time.sleep(0.3))
    init()

platform.init_process_group = slow_init
failures, classes, start = [], set(), threading.Barrier(4)

def use(x):
    start.wait()
    try:
        mesh = hp.init_device_mesh("cpu", (1,))
        start.wait()
        classes.add(type(hp.distribute_tensor(x, mesh, [hp.Shard(0)])))
    except Exception as error:
        failures.append(error)

threads = [threading.Thread(target=use, args=(make(),)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures and len(classes) == len(inits) == 1, (failures, classes, inits)
print("passed")
"""

#: Children are forked from two ranks, and call collectives. A function ``make()`` that gives a tensor comes before it.
IN_A_FORK = """
import os, signal, time
import hyper_parallel as hp
mesh = hp.init_device_mesh("cpu", (2,))
x = hp.distribute_tensor(make(), mesh, [hp.Shard(0)])

def refused(call):
    try:
        call()
    except RuntimeError as error:
        return "forked from rank" in str(error)

child = os.fork()
if not child:
    both = [refused(call) for call in (x.full_tensor, lambda: hp.init_device_mesh("cpu", (1, 2)))]
    os._exit(0 if both == [True, True] else 1)
until, ended = time.monotonic() + 20, (0, 0)
while not ended[0] and time.monotonic() < until:
    time.sleep(0.05)
    ended = os.waitpid(child, os.WNOHANG)
if not ended[0]:
    os.kill(child, signal.SIGKILL)
x.full_tensor()
assert ended == (child, 0), ended
print("passed", flush=True)
mesh.platform.destroy_process_group()
"""


def fresh(code: str, ranks: int = 1) -> None:
    """Run ``code`` in a process that has imported the framework alone; it must print "passed" and end well. With
    several ranks, one runs for each, under torchrun's variables."""
    if ranks > 1:
        ended = run_ranks(["-c", code], ranks, GLOG_v="3")
    else:
        ended = run_each(["-c", code], [{"GLOG_v": "3"}])
    # Not as a line: a framework may log something behind it.
    assert all(end.status == 0 and "passed" in end.out for end in ended), "\n".join(map(str, ended))


def page_has(framework: str, text: str) -> bool:
    """Return whether docs/patches.md has ``text`` as the table of ``framework``."""
    # Not at the top: programs that show that nothing is imported import this module.
    from tests.support.patch_table import with_table

    page = (ROOT / "docs" / "patches.md").read_text(encoding="utf-8")
    return with_table(page, framework, text) == page
