from types import SimpleNamespace

from tests.internals import folder_of


def test_models_of_the_hub_are_found_in_its_cache(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    found = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *args, **kwargs: found(*args, cache_dir=tmp_path, **kwargs),
    )
    config = SimpleNamespace(name_or_path="org/name", _commit_hash="abc")
    assert folder_of(config) == snapshot
    config.name_or_path = "org/another"
    assert folder_of(config) is None
    config.name_or_path = str(tmp_path)
    assert folder_of(config) == tmp_path
