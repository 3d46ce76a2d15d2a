"""LoRA, DPO, GRPO and PPO: the quick forms of the four scripts, and what they share."""

import csv
import gc
import json
import re
from pathlib import Path

import pytest
import script_start
import side_by_side
import torch
from losses import read_losses
from side_by_side import KINDS

from .conftest import EXAMPLES, gemm_counts, run_example

SCRIPTS = ("lora_sft", "dpo_trl", "grpo_trl", "rlhf_ppo")
ALL = """
import importlib, os, sys
examples, precision, output, *given = sys.argv[1:]
sys.path.insert(0, examples)
os.environ["ACCELERATE_MIXED_PRECISION"] = precision
names = ("lora_sft", "dpo_trl", "grpo_trl")
scripts = [importlib.import_module(name) for name in names]
for script in scripts:
    fork = os.fork()  # a process for each, without its imports
    if not fork:
        sys.argv = [script.__name__, *given, "--output", output + "/" + script.__name__]
        script.train(script.parse_arguments())
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0, script
"""


def options(assets_cache: Path) -> list[str]:
    """A model that was shown few answers, and few and short ones of its own."""
    short = ["--batch-size", "8", "--max-answer", "12", "--eval-rows", "4"]
    short += ["--steps", "2", "--start-steps", "2"]
    return ["--quick", *short, "--assets", str(assets_cache)]


@pytest.fixture
def ppo(once, assets_cache, forked_hosts):
    """Folder of PPO in both precisions, which the script itself compares."""

    def make(folder: Path) -> None:
        given = [*options(assets_cache), "--output", str(folder / "out")]
        printed = run_example([forked_hosts, str(EXAMPLES / "rlhf_ppo.py"), *given], folder)
        (folder / "printed").write_text(printed)

    return once("ppo", make)


@pytest.fixture
def results(once, assets_cache, forked_hosts, ppo):
    """precision -> script -> result.json, and the first row of curves.csv."""

    def make(folder: Path) -> None:
        for precision in side_by_side.PRECISIONS:
            given = [str(EXAMPLES), precision, str(folder / precision), *options(assets_cache)]
            run_example([forked_hosts, "-c", ALL, *given], folder)

    folder = once("alignment", make)
    found = {precision: {} for precision in side_by_side.PRECISIONS}
    for precision, runs in found.items():
        for name in SCRIPTS:
            run = ppo / "out" / precision if name == "rlhf_ppo" else folder / precision / name
            runs[name] = json.loads((run / "result.json").read_text())
            runs[name]["first"] = read_losses(run / "curves.csv")[0]
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_say_nothing_of_fp8_but_the_flag(name):
    source = (EXAMPLES / f"{name}.py").read_text()
    assert not re.search(r"torch_fp8|accelerate_fp8|Float8|mixed_precision=", source)


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_frozen_weights_take_a_byte_and_nothing_else_is_kept(name, results):
    bf16, fp8 = (results[precision][name] for precision in side_by_side.PRECISIONS)
    loaded = 4.0 if name in ("dpo_trl", "grpo_trl") else 2.0  # TRL loads a reference in float32
    assert bf16["frozen_bytes_per_parameter"] == loaded
    assert 1.0 < fp8["frozen_bytes_per_parameter"] <= 1.02
    for result in (bf16, fp8):
        held = sum(sum(sizes.values()) - sizes["caches"] for sizes in result["memory"].values())
        peak = max(result["live"].values())
        assert held <= peak <= held + 1.5 * 2**20  # batches, tokenized data; no second copy


@pytest.mark.long
def test_ppo_holds_four_models(results):
    """Weights of all four, and moments, fall as those of four LLaMA-7B do, but for embeddings."""
    totals = {}
    for precision, runs in results.items():
        roles = runs["rlhf_ppo"]["memory"]
        assert list(roles) == ["policy", "value", "reward", "reference"]
        for role, sizes in roles.items():
            assert (sizes["gradients"] > 0) == (role in ("policy", "value"))
            assert (sizes["frozen weights"] > 0) == (role in ("reward", "reference"))
        totals[precision] = {kind: sum(sizes[kind] for sizes in roles.values()) for kind in KINDS}
    bf16, fp8 = (side_by_side.with_all_weights(totals[p]) for p in side_by_side.PRECISIONS)
    assert fp8["weights"] < 0.56 * bf16["weights"]
    assert fp8["moments"] < 0.3 * bf16["moments"]
    assert bf16["residuals"] == 0 < fp8["residuals"]


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_both_precisions_begin_alike(name, results):
    bf16, fp8 = (results[precision][name] for precision in side_by_side.PRECISIONS)
    assert [r["precision"] for r in (bf16, fp8)] == ["bf16", "fp8"]
    assert fp8["first"]["eval_loss"] == pytest.approx(bf16["first"]["eval_loss"], rel=0.01)
    assert fp8["first"]["eval_loss"] != bf16["first"]["eval_loss"]
    assert bf16["first"]["eval_kl"] < 1e-3
    assert (fp8["first"]["eval_kl"] > 0) == (name != "lora_sft")  # where two models are compared
    assert fp8["final"]["eval_kl"] > fp8["first"]["eval_kl"]


@pytest.mark.long
def test_without_a_launcher_both_precisions_are_compared(ppo):
    rows = list(csv.DictReader((ppo / "out/comparison.csv").open()))
    assert [row["precision"] for row in rows] == ["bf16", "fp8"]
    assert [float(row["bytes/frozen"]) for row in rows] == [2, 1]
    roles = [row["model"] for row in csv.DictReader((ppo / "out/memory.csv").open())]
    assert roles == 2 * ["policy", "value", "reward", "reference", "all"] + ["all"]
    assert (ppo / "out/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "emulated" in (ppo / "printed").read_text()
    assert gemm_counts(ppo, "/bf16")["scaled_mm"] == 0
    assert gemm_counts(ppo, "/fp8")["scaled_mm"] > 0


def test_a_package_that_is_missing_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x.py", "--output", str(tmp_path / "out"), "--model", "m"])
    arguments = side_by_side.parse(side_by_side.argument_parser("x", "X.", (5e-4, 1e-6)))
    assert arguments.learning_rate == 1e-6
    with pytest.raises(script_start.Refusal, match="pip install no_such_package"):
        side_by_side.compare("x.py", {}, arguments, needs=("json", "no_such_package"))
    assert not (tmp_path / "out").exists()


def test_live_bytes_counts_a_storage_once():
    from alignment_record import live_bytes

    gc.collect()
    before = live_bytes()
    x = torch.zeros(1000, 16)
    views = [x[10:], x.T]
    assert live_bytes() - before == x.nbytes
    del x, views
    assert live_bytes() == before


def test_a_worse_answer_is_anothers_or_cut_short():
    from alignment import preferences

    rows = [{"prompt": [i], "answer": f"Return item number {i}."} for i in range(4)]
    made = preferences(rows)
    assert [row["chosen"][0]["content"] for row in made] == [row["answer"] for row in rows]
    worse = [row["rejected"][0]["content"] for row in made]
    assert worse == ["Return item", rows[2]["answer"], "Return item", rows[0]["answer"]]


@pytest.mark.parametrize("conversational", [True, False], ids=["conversations", "texts"])
def test_pairs_of_ones_own_are_taken_as_they_are(conversational, tmp_path):
    from alignment import preferences, read_pairs

    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    if conversational:
        question = {"role": "user", "content": "q"}
        better, worse = ({"role": "assistant", "content": text} for text in "ab")
        row = {"chosen": [question, better], "rejected": [question, worse]}
    data = tmp_path / "pairs.jsonl"
    data.write_text(2 * (json.dumps(row) + "\n"))
    rows = read_pairs(data)
    prompt = [{"role": "user", "content": "q"}]
    assert rows == 2 * [{"prompt": prompt, "answer": "a", "worse": "b"}]
    (made, _) = preferences(rows)
    assert (made["chosen"][0]["content"], made["rejected"][0]["content"]) == ("a", "b")
    data.write_text('{"prompt": "q", "completion": "a"}\n')
    assert read_pairs(data) == []


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
    ],
    ids=lambda row: "/".join(row),
)
def test_any_row_is_a_prompt_and_an_answer(row):
    from alignment import prompt_and_answer

    assert prompt_and_answer(row) == {"prompt": [{"role": "user", "content": "q"}], "answer": "a"}


@pytest.mark.long
def test_the_rewards_of_grpo_are_verified():
    from grpo_trl import has_the_words, is_a_sentence, words_of

    texts = ["Return the size of a file.", "return it.", "Two. Sentences.", "Cut off"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert is_a_sentence(completions) == [1, 0, 0, 0]
    row = {"prompt": [{"content": "Describe.\n\ndef _file_size2(x):"}], "answer": "?"}
    assert words_of(row) == ["file", "size"]
    assert has_the_words(completions, [words_of(row)] * 4) == [1, 0, 0, 0]
    assert words_of({"prompt": [{"content": "Hi"}], "answer": "One two"}) == ["one", "two"]


def tiny_policy():
    """A model whose positions are absolute: one that is off by the padding shows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def test_padding_before_a_prompt_changes_no_probability():
    from rlhf_ppo import Models

    policy = tiny_policy()
    models = Models(policy, policy, policy, policy)
    ids = torch.randint(1, 32, (2, 9))
    seen = torch.ones_like(ids, dtype=torch.bool)
    whole = models.logprobs(policy, ids, seen, 4)
    padding = torch.zeros(2, 3, dtype=torch.long)
    padded = models.logprobs(
        policy, torch.cat([padding, ids], 1), torch.cat([padding.bool(), seen], 1), 4
    )
    torch.testing.assert_close(padded, whole)
    everything = policy(ids).logits[:, :-1].log_softmax(-1)
    expected = everything.gather(-1, ids[:, 1:, None])[:, -4:, 0]
    torch.testing.assert_close(whole, expected)


def test_advantages_have_mean_0_and_variance_1_where_answers_are():
    from rlhf_ppo import masked_mean, whitened

    x, mask = torch.randn(3, 5) * 4 + 2, torch.tensor([[1, 1, 0, 0, 0]] * 2 + [[1] * 5])
    made = whitened(x, mask)
    assert made[mask == 0].abs().max() == 0
    torch.testing.assert_close(masked_mean(made, mask), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(masked_mean(made**2, mask), torch.tensor(1.0))


def test_the_table_of_memory_sums_models_and_says_what_changed():
    sizes = {"frozen weights": 4.0, "trained weights": 8.0, "residuals": 0.0, "moments": 16.0}
    sizes = {kind: int(size * 2**20) for kind, size in sizes.items()} | {
        "gradients": 0,
        "caches": 0,
    }
    half = {kind: size // 2 for kind, size in sizes.items()} | {"residuals": 2**20}
    *rows, change = side_by_side.memory_rows(
        {"bf16": {"memory": {"a": sizes}}, "fp8": {"memory": {"a": half, "b": half}}}
    )
    assert [(row["precision"], row["model"], row["weights"]) for row in rows] == [
        ("bf16", "a", "12.00"),
        ("bf16", "all", "12.00"),
        ("fp8", "a", "6.00"),
        ("fp8", "b", "6.00"),
        ("fp8", "all", "12.00"),
    ]
    assert (change["weights"], change["moments"], change["residuals"]) == ("+0.0%", "+0.0%", "")
