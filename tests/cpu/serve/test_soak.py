"""The mixed load of scripts/soak.py for a few seconds; `python scripts/soak.py --minutes 10 --warm-up 60` is the long form."""

from scripts.soak import soak


def test_mixed_load_with_hostile_messages():
    account = soak(8.0, warm_up=2.0)
    assert account["faults"] == []
    assert account["warm_up"]["robots"] == 16
    assert account["robots_ok"] > 100
    assert account["hostile"] == account["hostile_refused"] + account["hostile_closed"] > 50
    assert account["cut_off"] >= 50
    assert (
        account["outcomes"]["ok"] >= account["robots_ok"]
    )  # some cut-off sessions were answered before the cut was seen
