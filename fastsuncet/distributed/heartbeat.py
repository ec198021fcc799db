"""Name the rank that the others wait for, and end the job when that rank does not come back.

Each rank counts the points that its training loop passes. A thread posts the count to the store of the process group
every few seconds; the step itself communicates nothing. All ranks pass the same points in the same order. So in a hang
the others wait for the rank with the lowest count, or for one that posts no longer.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from typing_extensions import Self

from fastsuncet.distributed.collectives import rank, world_size
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import HungError

SHOWN = 4  # ranks named in a message, at most
RECORD = 10.0  # seconds


class Heartbeat:
    """`with Heartbeat(...) as heart:`, and `heart.at(step, "reads images")` at each point, on every rank.

    After `timeout` seconds without a new point, `end(message)` is called on every rank; it must end the process,
    because the main thread waits in a collective and cannot. Before that, one rank says what it waits for, after a
    minute and then at doubling intervals. A single process has no thread, and nothing is watched.
    """

    period = 5.0  # seconds between two posts

    def __init__(
        self, timeout: float, signals: SignalFlag, say: Callable[[str], None], end: Callable[[str], None]
    ):
        self.timeout, self.signals, self.say, self.end = timeout, signals, say, end
        self.rank, self.ranks = rank(), world_size()
        self.store: Store | None = None  # until the thread has connected to it
        self.position = (0, 0, "starts")  # points passed, updates done, the last point
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def at(self, step: int, point: str) -> None:
        """Say that this rank's training loop is at `point`: "reads images"."""
        self.position = (self.position[0] + 1, step, point)

    def __enter__(self) -> Self:
        if self.ranks > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * self.period)  # not longer: the store can be gone

    def _watch(self) -> None:
        position, since, warned, posts = None, 0.0, 0.0, {}
        exchange = threading.Thread()
        # Here and not in the main thread: it would try for minutes where the process that holds the store is gone, and
        # hear no stop signal.
        with suppress(RuntimeError):
            self.store = _own_connection(_get_default_store())
        while not self._stop.wait(self.period):
            now = time.monotonic()
            if self.position != position:
                position, since, warned, posts = self.position, now, 0.0, {}
            waited, asked = now - since, self.signals.requested
            # After a stop signal, a scheduler waits only a short time for the save.
            first = min(10 if asked else 60, self.timeout / 3)
            # In a thread: where the process that holds the store is stopped, the exchange does not return.
            if not exchange.is_alive():
                exchange = threading.Thread(
                    target=self._exchange, args=(posts, now, waited > first / 2), daemon=True
                )
                exchange.start()
                exchange.join(self.period)
            if exchange.is_alive():
                agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                holder, silent = ("torchrun's agent" if agents else "rank 0"), {0}
                text = f"waiting for {holder} (its process, through which ranks meet, does not answer)"
            else:
                silent, text = self._waiting_for(posts, now)
            speaks = self.rank == min((r for r in range(self.ranks) if r not in silent), default=self.rank)
            # The others end later: the one that speaks would see their connections break first.
            if waited > self.timeout + (0 if speaks else 3 * self.period):
                saved = "Nothing was saved since the newest checkpoint; the same command continues from it"
                self.end(f"no step for {waited:,.0f} s (meta.timeout): {text}. {saved}" if speaks else "")
                return
            if waited > max(first, 2 * warned):
                warned = waited
                # It can be the save that the signal asked for.
                stop = f"{asked}: the run stops after that, or " if asked else ""
                if speaks:
                    ending = f"meta.timeout ends the job after {self.timeout:,.0f} s"
                    self.say(f"no step for {waited:,.0f} s, {text}; {stop}{ending}")

    def _exchange(self, posts: dict[int, tuple[bytes, float]], now: float, read: bool) -> None:
        """Post where this rank is; with `read`, add to `posts` where each rank is and when it last posted anew.

        `posts` is empty afterwards if the process that holds the store has ended.
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
        except RuntimeError:
            posts.clear()

    def _waiting_for(self, posts: dict[int, tuple[bytes, float]], now: float) -> tuple[set[int], str]:
        """Return the ranks that post no longer, and a text that names those that the others wait for."""
        silent = {number for number, (_, when) in posts.items() if now - when > 2.5 * self.period}
        # A rank that never posted has passed no point: before any other, they wait for it.
        found = {number: json.loads(post) if post else [-1] for number, (post, _) in posts.items()}
        behind = silent or {number for number in found if found[number][0] == min(found.values())[0]}
        if not behind:
            return silent, "waiting for another rank"
        lines = []
        for number in sorted(behind)[:SHOWN]:
            if found[number] == [-1]:
                lines.append(f"rank {number} (has not begun)")
                continue
            _, step, point, where, _ = found[number]
            gone = "no sign of life; last seen where it " if number in silent else ""
            lines.append(f"rank {number} ({gone}{point} after step {step:,}, in {where})")
        if len(behind) > SHOWN:
            lines.append(f"{len(behind) - SHOWN} more")
        return silent, f"waiting for {', '.join(lines)}"


def _own_connection(store: Store) -> Store:
    """Return `store` over another connection: a wait of the main thread would block one that threads share."""
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, PrefixStore):  # torch 2.6
        store = store.underlying_store
    return TCPStore(store.host, store.port, wait_for_workers=False) if isinstance(store, TCPStore) else store


def end_hung(message: str, record: Callable[[], None]) -> None:
    """End the process with the exit code of HungError; the main thread waits in a collective and cannot.

    `record` keeps the reason on the disk. It has RECORD seconds, because the disk can be what hangs.
    """
    try:
        if message:
            print(f"[rank {rank()}] error: {message}", file=sys.stderr, flush=True)
        recording = threading.Thread(target=record, daemon=True)
        recording.start()
        recording.join(RECORD)
    finally:  # also without a standard error or a further thread
        os._exit(HungError.exit_code)
