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
