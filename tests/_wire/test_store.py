"""Questions to a store end in time, whatever the store does."""

import pytest

from allgrad._wire import store


def test_a_silent_store_is_asked_no_second_question():
    class Silent:
        def __init__(self):
            self.asked = 0

        def get(self):
            self.asked += 1
            store.time.sleep(1)

    silent = Silent()
    for _ in range(3):
        with pytest.raises(store.StoreSilent):
            store.ask(silent, silent.get, 0.1)
    assert silent.asked == 1
    assert store.ask(Silent(), lambda: 7) == 7  # another one is not affected


def test_a_question_that_could_not_be_asked_leaves_no_silence(monkeypatch):
    client = object()

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(store.threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            store.ask(client, lambda: 7)
    monkeypatch.setattr(store, "_SILENT", 0.2)
    assert store.ask(client, lambda: 7, 0.5) == 7
