"""Supervised fine-tuning of a causal language model with the Lightning Trainer, for `evidence`.

    python benchmarks/comparison/sft_lightning.py --precision fp8-mixed \
        --model meta-llama/Llama-3.2-1B-Instruct --data chats.jsonl

Precision is Trainer's argument and nothing else here depends on it.
"""

from pathlib import Path

import script_start

if __name__ == "__main__":
    script_start.begin()

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch_fp8_tools.compare import bf16_products

from fine_tuning import FineTuning, num_targets, prepare
from run_record import RunRecord
from sft_arguments import argument_parser, checkpoint_to_resume


class SupervisedFineTuning(L.LightningModule):
    def __init__(self, run: FineTuning) -> None:
        super().__init__()
        self.run = run
        self.model = run.model.train()
        self.micro_losses: list[Tensor] = []
        self.eval_sums = torch.zeros(2, dtype=torch.float64)  # loss * tokens, tokens
        self.record: RunRecord | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.micro_losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_validation_start(self) -> None:
        self._open_record()

    def on_train_start(self) -> None:
        self._open_record()  # resumed: there was no evaluation before

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.record.train(self.global_step + 1, float(torch.stack(self.micro_losses).mean()))
        self.micro_losses.clear()

    def on_train_batch_end(self, *_: object) -> None:
        if self.trainer.optimizers[0].state:
            self.record.measure(self.model, self.trainer.optimizers[0])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tokens = num_targets(batch)
        self.eval_sums += torch.tensor(
            [float(self.model(**batch, use_cache=False).loss) * tokens, tokens]
        )

    def on_validation_epoch_end(self) -> None:
        loss = float(self.eval_sums[0] / self.eval_sums[1])
        self.eval_sums.zero_()
        self.log("eval_loss", loss, prog_bar=True)
        self.record.evaluation(self.global_step, loss)

    def configure_optimizers(self) -> dict:
        arguments = self.run.arguments
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay
        )
        schedule = self.run.schedule(optimizer, self.trainer.world_size)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        trainer = self.trainer
        seen = trainer.global_step * self.run.arguments.accumulate
        return self.run.train_loader(trainer.world_size, trainer.global_rank, start=seen)

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        return self.run.eval_loader()

    def _open_record(self) -> None:
        if self.record is None:
            output, step = self.run.arguments.output, self.global_step
            self.record = RunRecord(output, resume_at=step, write=self.trainer.is_global_zero)


def parse_arguments():
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--precision", default="fp8-mixed", help="Trainer's precision")
    arguments = parser.parse_args()
    own = "sft_lightning_quick" if arguments.quick else "sft_lightning"
    arguments.output = arguments.output or Path("runs") / own
    return arguments


def train(arguments, precision: str) -> dict:
    """Fine-tune, save the model to <output>/model and return the run's result."""
    last = checkpoint_to_resume(arguments)
    L.seed_everything(arguments.seed)
    run = prepare(arguments)
    module = SupervisedFineTuning(run)
    checkpoint = ModelCheckpoint(
        arguments.output / "checkpoints",
        "last",
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )  # one, after every evaluation
    trainer = L.Trainer(
        precision=precision,
        max_epochs=1,  # the loader reads the data --epochs times
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=arguments.clip,
        val_check_interval=arguments.eval_every * arguments.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,  # a full evaluation of the model as it came
        use_distributed_sampler=False,  # the run's own order knows ranks and resuming
        default_root_dir=arguments.output,
        logger=False,  # losses.csv is written by the record
        enable_model_summary=False,
        callbacks=[checkpoint],
    )
    trainer.fit(module, ckpt_path=last)
    if module.record.rows[-1].get("eval_loss") is None:
        trainer.validate(module, verbose=False)
    if trainer.is_global_zero:
        run.model.save_pretrained(arguments.output / "model")
        run.tokenizer.save_pretrained(arguments.output / "model")
    return module.record.finish(
        precision=precision, seed=arguments.seed, bf16_products=arguments.bf16_products
    )


def main() -> None:
    arguments = parse_arguments()
    if arguments.started_by_comparison:
        script_start.end_with_input()
    arguments.bf16_products = bf16_products.choose(arguments.bf16_products)
    train(arguments, arguments.precision)


if __name__ == "__main__":
    script_start.run(main)
