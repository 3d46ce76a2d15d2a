"""transformers' arguments and Trainer under the launcher's flag."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


@pytest.fixture
def launched(accelerate: Any, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    return monkeypatch


def _precision(tmp_path: Path, **options: Any) -> str:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    return arguments.mixed_precision


@pytest.mark.parametrize(("rank", "messages"), [("0", 1), ("1", 0)])
def test_flag_wins_over_bf16_and_says_so_once(
    launched: pytest.MonkeyPatch,
    tmp_path: Path,
    rank: str,
    messages: int,
) -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.warning_once.cache_clear()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)  # caplog would see a propagated record twice
    logging.getLogger("transformers").addHandler(handler)
    launched.setenv("RANK", rank)
    try:
        assert _precision(tmp_path, bf16=True) == "fp8"
        assert _precision(tmp_path, bf16=True) == "fp8"
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert stream.getvalue().count("is overridden by --mixed_precision fp8") == messages


def test_bf16_without_the_flag_stays(accelerate: Any, tmp_path: Path) -> None:
    assert _precision(tmp_path, bf16=True) == "bf16"
    assert _precision(tmp_path) == "no"


@pytest.mark.usefixtures("launched")
def test_fp16_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _precision(tmp_path, fp16=True) == "fp16"


def test_bf16_stays_where_another_backend_was_chosen(
    launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched.setenv("ACCELERATE_FP8_BACKEND", "ao")
    assert _precision(tmp_path, bf16=True) == "bf16"


@pytest.mark.usefixtures("launched")
def test_data_parallel_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(tiny_model), arguments, train_dataset=rows
    )
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel.*2 GPUs.*--multi_gpu"):
        trainer.train()
