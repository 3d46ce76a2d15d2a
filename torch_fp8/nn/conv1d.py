"""`Float8Conv1D`: GPT-2's linear layer, whose weight is stored transposed, with FP8 GEMMs.

``transformers.pytorch_utils.Conv1D`` computes ``y = x w + b`` with a weight (K, N). The three GEMMs
are a linear layer's: fprop takes the weight's transposed layout, which dgrad takes elsewhere, dgrad
the one in which it is stored, and wgrad gives ``x^T g``, (K, N), the same product with its operands
exchanged.
"""

from torch import Tensor

from torch_fp8.nn.linear import Float8Layer


class Float8Conv1D(Float8Layer):
    """The part of a converted Conv1D that goes in front of its own class.

    It is no ``nn.Linear``: PEFT and others look at the class to learn how the weight lies.

    Shapes: x (..., K), weight (K, N), bias (N,), output (..., N).
    """

    nf: int
    fp8_transposed = True

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.in_features}, fp8={self.fp8.recipe})"
