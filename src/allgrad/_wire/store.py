"""Questions to the store in which the ranks find each other, each with a time limit.

The client of a store on another host waits for ever when nothing comes back, and holds a lock that
all later questions need. So a question is asked on a thread of its own, and no second one is asked
before the first is answered.
"""

from __future__ import annotations

import threading
import time
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StoreSilent", "ask", "clear", "describe", "read", "tick", "ticks_so_far"]

T = TypeVar("T")

_SECONDS = 1.5
_SILENT = 3.5  # a question that is older than this gets no answer
_TICKS = "allgrad/ticks"
_lock = threading.Lock()


class _Question(NamedTuple):
    client: Any  # held, so that no other one gets its id
    asked: float
    answer: Future[Any]


_unanswered: dict[int, _Question] = {}


class StoreSilent(RuntimeError):
    """The store did not answer in time."""


def ask(store: Any, question: Callable[[], T], seconds: float = _SECONDS) -> T:
    """The answer to a question about a store, or ``StoreSilent`` after so many seconds."""
    client, until = _client(store), time.monotonic() + seconds
    with _lock:
        before = _unanswered.get(id(client))
        if before is not None:
            _wait(before.answer, min(until, before.asked + _SILENT))
        answer: Future[T] = Future()
        threading.Thread(target=_answer, args=(question, answer), daemon=True).start()
        _unanswered[id(client)] = _Question(client, time.monotonic(), answer)
    _wait(answer, until)
    _unanswered.pop(id(client), None)
    return answer.result()


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # noqa: BLE001 - raised where the question was asked
        answer.set_exception(error)


def _wait(answer: Future[Any], until: float) -> None:
    if not futures.wait([answer], max(0.0, until - time.monotonic())).done:
        raise StoreSilent("the store does not answer")


def read(store: Any, key: str) -> str:
    """The text under a key; empty if there is none.

    Texts are cleared, and no key is deleted: one that was deleted between these two questions would be
    waited for until the store's own timeout, and all later questions with it
    (test_what_is_withdrawn_between_two_questions_is_not_waited_for).
    """
    return store.get(key).decode("utf-8", errors="replace") if store.check([key]) else ""


def clear(store: Any, key: str) -> None:
    """Leave no text under a key."""
    if store.check([key]):
        store.set(key, "")


def tick(store: Any) -> int:
    """A number above all that any rank got from this store before."""
    number: int = store.add(_TICKS, 1)
    return number


def ticks_so_far(store: Any) -> int:
    """The last number that any rank got.

    A launcher's store outlives the worlds of its processes: what ranks wrote in a former one has no
    higher number (test_waits_of_a_former_world_are_not_compared).
    """
    number: int = store.add(_TICKS, 0)
    return number


def describe(store: Any) -> str:
    """``the store at ADDRESS``, where it has one."""
    client = _client(store)
    return f"the store at {client.host}:{client.port}" if hasattr(client, "port") else "the store"


def _client(store: Any) -> Any:
    """The client that speaks for a store and all its prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
