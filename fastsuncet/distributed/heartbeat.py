"""Name the rank that the others wait for, and end the job when that rank does not come back.

Each rank counts the points that its training loop passes, and a thread posts the count to the store of the process
group every few seconds; the step itself communicates nothing. All ranks pass the same points in the same order. So in a
hang the others wait for the rank with the lowest count, or for one that posts no longer.

A rank that an error ends posts that too: on a GPU the others would wait in a collective of NCCL.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import Self

from fastsuncet.distributed.collectives import rank, world_size
from fastsuncet.distributed.place import agent_holds_store
from fastsuncet.errors import FastSuncetError, HungError, NumericalError, Preempted
from pipelines.output import Say

SHOWN = 4  # ranks named in a message, at most
RECORD = 10.0  # seconds
ENDED = "has ended"  # the last point of a rank that left with an error


class Heartbeat:
    """`with Heartbeat(...) as heart:`, and `heart.at(step, "reads images")` at each point, on every rank.

    After a minute without a new point, and then at doubling intervals, one rank says what it waits for. After `timeout`
    seconds `end(error)` is called on every rank, on one of them with a text; it must end the process, because the main
    thread waits in a collective. Where a rank has ended with an error, `end` is called after half a minute, or after
    two if it was rank 0 and held the store. A single process has no thread, and nothing is watched.
    """

    period = 5.0  # seconds between two posts

    def __init__(self, timeout: float, say: Say, end: Callable[[FastSuncetError], None]):
        self.timeout, self.say, self.end = timeout, say, end
        self.rank, self.ranks = rank(), world_size()
        self.store: Store | None = None  # until the thread has connected to it
        self.gone = ""  # the rank that was found to have ended with an error
        self.position = (0, 0, "starts")  # points passed, updates done, the last point
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def at(self, step: int, point: str) -> None:
        self.position = (self.position[0] + 1, step, point)

    def __enter__(self) -> Self:
        if self.ranks > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * self.period)  # not longer: the store can be gone
            # All ranks raise these two together, and fits of a grid go on after the second.
            if kind is not None and not issubclass(kind, (Preempted, NumericalError)):
                self.at(self.position[1], ENDED)
                self._exchange_in_time({}, time.monotonic(), False)

    def _watch(self) -> None:
        position, since, warned, posts = None, 0.0, 0.0, {}
        exchange, first = threading.Thread(), min(60, self.timeout / 3)
        # A connection of its own: a wait of the main thread would block one that threads share. It is made here: where
        # the process that holds the store is gone, the main thread would try for minutes and hear no stop signal.
        with suppress(RuntimeError):
            self.store = _get_default_store().clone()
        while not self._stop.wait(self.period):
            now = time.monotonic()
            if self.position != position:
                position, since, warned, posts = self.position, now, 0.0, {}
            waited = now - since
            if not exchange.is_alive():
                exchange = self._exchange_in_time(posts, now, waited > first / 2)
            if exchange.is_alive():
                holder, silent = ("torchrun's agent" if agent_holds_store() else "rank 0"), {0}
                text = f"waiting for {holder} (its process, through which ranks meet, does not answer)"
            else:
                silent, text = self._waiting_for(posts, now)
            # Without posts this rank's connection to the store has broken, perhaps alone: a long save may go on.
            if self.gone and waited > (first / 2 if posts else 2 * first):
                text = f"{self.gone} has ended, and this one with it; its message has the reason"
                self.end(FastSuncetError(text))
                return
            speaks = self.rank == min((r for r in range(self.ranks) if r not in silent), default=self.rank)
            # The others end later: the one that speaks would see their connections break first.
            if waited > self.timeout + (0 if speaks else 3 * self.period):
                saved = "Nothing was saved since the newest checkpoint; the same command continues from it"
                message = f"no step for {waited:,.0f} s (meta.timeout): {text}. {saved}"
                self.end(HungError(message if speaks else ""))
                return
            if waited > max(first, 2 * warned):
                warned = waited
                if speaks:
                    self.say(
                        f"no step for {waited:,.0f} s, {text}; meta.timeout ends the job after {self.timeout:,.0f} s"
                    )

    def _exchange_in_time(self, *given: object) -> threading.Thread:
        """Start `_exchange` and wait for a period: where the process that holds the store is stopped, it hangs."""
        exchange = threading.Thread(target=self._exchange, args=given, daemon=True)
        exchange.start()
        exchange.join(self.period)
        return exchange

    def _exchange(self, posts: dict[int, tuple[bytes, float]], now: float, read: bool) -> None:
        """Post where this rank is; with `read`, add to `posts` where each rank is and when it last posted anew.

        `posts` is empty afterwards if the process that holds the store has ended. Sets `gone`.
        """
        if self.store is None:
            return
        # Not by `traceback`, which reads the source file: its disk can be what hangs.
        frame = sys._current_frames().get(self._main or 0, sys._getframe())
        where = f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        try:
            self.store.set(f"heartbeat/{self.rank}", json.dumps([*self.position, where, now]))
            for number in range(self.ranks) if read else ():
                key = f"heartbeat/{number}"
                post = self.store.get(key) if self.store.check([key]) else b""
                if number not in posts or posts[number][0] != post:
                    posts[number] = (post, now)
                if ENDED.encode() in post:
                    self.gone = f"rank {number}"
        except RuntimeError:
            posts.clear()
            self.gone = "" if agent_holds_store() else "rank 0"

    def _waiting_for(self, posts: dict[int, tuple[bytes, float]], now: float) -> tuple[set[int], str]:
        """Return the ranks that post no longer, and a text that names those that the others wait for."""
        silent = {number for number, (_, when) in posts.items() if now - when > 2.5 * self.period}
        # A rank that never posted has passed no point: before any other, they wait for it.
        found = {number: json.loads(post) if post else [-1] for number, (post, _) in posts.items()}
        behind = silent or {number for number in found if found[number][0] == min(found.values())[0]}
        names = []
        for number in sorted(behind)[:SHOWN]:
            what = "no sign of life yet"
            if len(found[number]) > 1:
                _, step, point, where, _ = found[number]
                gone = "no sign of life; last seen where it " if number in silent else ""
                what = f"{gone}{point} after step {step:,}, in {where}"
            names.append(f"rank {number} ({what})")
        more = ", and more" if len(behind) > SHOWN else ""
        return silent, f"waiting for {', '.join(names) or 'another rank'}{more}"


def end_hung(error: FastSuncetError, record: Callable[[], object]) -> None:
    """Print an error and end the process with its exit code; the main thread waits in a collective and cannot.

    `record` keeps the reason on the disk. It has RECORD seconds, because the disk can be what hangs.
    """
    try:
        if str(error):
            print(f"[rank {rank()}] error: {error}", file=sys.stderr, flush=True)
        recording = threading.Thread(target=record, daemon=True)
        recording.start()
        recording.join(RECORD)
    finally:  # also without a standard error or a further thread
        os._exit(error.exit_code)
