import pytest
from torch.optim import SGD, AdamW

from tests.lightning_fp8.test_trainer import HOST, assert_stock, each_level, fit, make_model


@each_level
@pytest.mark.parametrize(
    "make", [lambda p: AdamW(p, lr=1e-6), lambda p: SGD(p, lr=1e-3)], ids=["AdamW", "SGD"]
)
def test_an_optimizer_that_is_exchanged_in_a_fit_trains_all_bits(make, level):
    model, before = make_model(HOST), []

    def exchange():
        if model.current_epoch == 1:
            model.trainer.optimizers = [make(model.parameters())]
            before.append(model.net[0].weight.detach().clone())

    model.on_train_epoch_start = exchange
    fit(HOST, level, max_epochs=2, model=model)
    moved = model.net[0].weight != before[0]
    assert moved.float().mean() > 0.8  # of BF16 alone next to none
    assert_stock(model)
