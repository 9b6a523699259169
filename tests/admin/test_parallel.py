"""Questions about any number of objects are asked in batches, each with the deadline of one operation."""

from tplayout.admin.parallel import are_there


def test_what_is_there_is_asked_in_batches(store, monkeypatch):
    names = [f"ns/{number}" for number in range(600)]
    for name in names[::7]:
        store.put(name, b"x")
    asked = []
    exists = type(store).exists

    def counted(self, keys, **options):
        asked.append(len(keys))
        return exists(self, keys, **options)

    monkeypatch.setattr(type(store), "exists", counted)
    assert are_there(store, names) == [number % 7 == 0 for number in range(600)]
    assert asked == [256, 256, 88]
    assert are_there(store, []) == []


def test_no_tool_asks_for_a_whole_prompt_at_once(store, kit, monkeypatch):
    """explain and quarantine, of a prompt of 300 chunks."""
    from tplayout.admin.explain import Prompt, explain
    from tplayout.admin.quarantine import plan, quarantine
    from tplayout.admin.verify import verify_store
    from tplayout.admin.wanted import Wanted

    identity = kit.identity(kit.group(layers=(0,), heads=1), chunk_tokens=1)
    namespace, _ = kit.fill(store, identity, tokens=range(300))
    exists = type(store).exists

    def limited(self, keys, **options):
        assert len(keys) <= 256
        return exists(self, keys, **options)

    monkeypatch.setattr(type(store), "exists", limited)
    assert explain(store, Wanted(identity, True), Prompt(range(300))).hit_chunks == 300
    for info in list(store.list(f"{namespace.name}/")):
        if not info.key.endswith("namespace.json"):
            store.put(info.key, b"damaged")
    moves = quarantine(store, plan(verify_store(store).findings))
    assert len([move for move in moves if not move.left]) == 300
