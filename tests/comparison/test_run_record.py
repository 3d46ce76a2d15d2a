"""What a run writes down, resumed runs included."""

import json

import torch
from run_record import RunRecord, bytes_per_parameter, read_losses

import torch_fp8


def trained_model():
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_resumed_record_goes_on_after_the_checkpoint(tmp_path):
    record = RunRecord(tmp_path)
    record.evaluation(0, 9.0)
    for step in range(1, 6):
        record.train(step, 9.0 - step)
    record = RunRecord(tmp_path, resume_at=3)
    record.train(4, 4.5)
    rows = read_losses(tmp_path / "losses.csv")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["eval_loss"] == 9.0
    assert rows[-1]["loss"] == 4.5
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_a_new_record_forgets_an_earlier_run(tmp_path):
    RunRecord(tmp_path).train(1, 5.0)
    RunRecord(tmp_path)
    assert read_losses(tmp_path / "losses.csv") == []


def test_only_the_writing_process_writes(tmp_path):
    record = RunRecord(tmp_path, write=False)
    record.train(1, 5.0)
    record.evaluation(1, 5.0)
    record.finish()
    assert list(tmp_path.iterdir()) == []


def test_the_result_holds_last_losses_and_what_was_measured(tmp_path):
    record = RunRecord(tmp_path)
    record.evaluation(0, 9.0)
    for step in range(1, 21):
        record.train(step, float(step))
    record.measure(*trained_model())
    record.evaluation(20, 3.0)
    record.finish(precision="bf16-mixed")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["final_train_loss"] == 19.5  # the last tenth of 20 steps
    assert (result["first_eval_loss"], result["final_eval_loss"]) == (9.0, 3.0)
    assert result["linear_layers"] == {"Linear": 2}
    assert result["steps"] == 20
    assert result["precision"] == "bf16-mixed"


def test_a_resumed_run_with_nothing_left_keeps_what_was_measured(tmp_path):
    record = RunRecord(tmp_path)
    record.evaluation(0, 9.0)
    record.train(1, 5.0)
    record.measure(*trained_model())
    record.evaluation(1, 4.0)
    first = record.finish()
    assert RunRecord(tmp_path, resume_at=1).finish() == first


def test_bytes_per_parameter_are_those_of_the_engine():
    """Weights, gradients and two float32 moments; the engine's count is of the same tensors."""
    model, optimizer = trained_model()
    assert bytes_per_parameter(model, optimizer) == 16
    report = torch_fp8.memory_report(model, optimizer)
    assert bytes_per_parameter(model, optimizer) == report.bytes_per_param


def test_bytes_of_wrapped_tensors_are_those_inside():
    """A two-tensor subclass counts its parts: that is how a payload and its scales are kept."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = torch.nn.Linear(8, 4, bias=False)
    model.weight.grad = TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8))
    optimizer = torch.optim.SGD(model.parameters())
    assert bytes_per_parameter(model, optimizer) == 4 + 8
