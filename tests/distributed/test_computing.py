"""Who computes and who builds, and what is given back."""

import gc
import threading
import time
import weakref

from guerdon.distributed.computing import Computing
from guerdon.memory import release


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_many_compute_and_one_builds() -> None:
    here, told = Computing(), []
    least, most = time.monotonic() + 0.5, time.monotonic() + 60
    lock = threading.Lock()
    now = {"computing": 0, "building": 0}

    def goes_on() -> bool:
        with lock:
            has_seen_all = any(each["building"] for each in told) and any(each["computing"] > 1 for each in told)
        return time.monotonic() < (least if has_seen_all else most)

    def take(what: str) -> None:
        while goes_on():
            with getattr(here, what)():
                with lock:
                    now[what] += 1
                    told.append(dict(now))
                time.sleep(0.002)
                with lock:
                    now[what] -= 1
            time.sleep(0.001)

    threads = [threading.Thread(target=take, args=(what,)) for what in ("computing",) * 3 + ("building",) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(min(each["computing"], 1), each["building"]) for each in told} == {(1, 0), (0, 1)}
    assert max(each["computing"] for each in told) > 1


def test_what_is_short_passes_a_builder_that_waits_for_something_long() -> None:
    here, is_over, order = Computing(), threading.Event(), []
    begun = threading.Event()

    def compute_long(name: str) -> None:
        with here.computing(is_long=True):
            begun.set()
            is_over.wait(120)
            order.append(name)

    def build() -> None:
        with here.building():
            order.append("built")

    first, builder = threading.Thread(target=compute_long, args=("first",)), threading.Thread(target=build)
    first.start()
    begun.wait(120)
    builder.start()
    while not here.is_building:
        time.sleep(0.001)
    with here.computing():
        order.append("short")
    second = threading.Thread(target=compute_long, args=("second",))
    second.start()
    time.sleep(0.01)  # it would begin now, if it did not wait for the builder
    is_over.set()
    for thread in (first, builder, second):
        thread.join()
    assert order == ["short", "first", "built", "second"] and not here.is_building


def test_release_collects_cycles_except_frozen_ones() -> None:
    outside = Cycle()
    stays = weakref.ref(outside)
    gc.freeze()
    try:
        cycle = Cycle()
        gone = weakref.ref(cycle)
        del cycle, outside
        num_outside = gc.get_freeze_count()
        release()
        assert gone() is None
        # Not to the last one: what nobody needs any more goes from there, too.
        assert stays() is not None and gc.get_freeze_count() > 0.9 * num_outside
    finally:
        gc.unfreeze()
