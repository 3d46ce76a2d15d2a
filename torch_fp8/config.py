"""`FP8Config`: all options for FP8 training, in one immutable object with a JSON form."""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from torch_fp8.quantization.formats import FORMATS
from torch_fp8.quantization.options import (
    ON_ALARM,
    PROBES,
    check_options,
    named,
    option,
    read_json,
)
from torch_fp8.quantization.overrides import Overrides, is_high_precision
from torch_fp8.quantization.recipe import E4M3_ONLY, GEMMS, RECIPES
from torch_fp8.quantization.wording import (
    naming_valid_options,
    suggestion,
    unknown_options,
    without_removed,
)

ENV_VAR = "TORCH_FP8_CONFIG"


@dataclass(frozen=True)
class FP8Config:
    """Options for FP8 training: an immutable object that can be written to JSON and read back.

    Attributes:
        recipe (str): ``auto``, ``tensorwise``, ``delayed``, ``rowwise``, ``blockwise`` or
            ``mxfp8``. ``auto`` measures tensorwise, rowwise and blockwise, which keep parity with
            BF16, on this card with the layers of this model, and takes the fastest. Layers that are
            no faster in FP8 stay in BF16. If FP8 is emulated, nothing is measured and ``auto`` is
            tensorwise. The start-up summary shows the choice. A recipe that you name either runs or
            raises an error. Default: ``"auto"``.
        wgrad (str): precision of the weight-gradient GEMM, ``fp8`` or ``bf16`` (SwitchBack).
            Default: ``"fp8"``.
        grad_format (str | None): format of gradients, ``e5m2`` or ``e4m3``, or None for the
            recipe's own (E5M2 for tensorwise and delayed, whose single scale needs the range; E4M3
            for finer scales). Default: ``None``.
        fast_accum (tuple[str, ...]): GEMMs that use the tensor core's fast accumulation, any of
            ``fprop``, ``dgrad`` and ``wgrad``. The default, fprop only, is also that of Transformer
            Engine and torchao. Block-scaled GEMMs (``blockwise``, ``mxfp8``) are promoted to
            float32 after every block and ignore this option. Default: ``("fprop",)``.
        amax_history_len (int): number of past amaxes from which recipe ``delayed`` computes the
            scale, at least 1. Default: ``1024``.
        amax_compute_algo (str): amax that recipe ``delayed`` takes from the history: its ``max`` or
            its ``most_recent`` entry. Default: ``"max"``.
        margin (int): headroom of recipe ``delayed`` in powers of two, 0 to 8; the scale is
            multiplied by 2^margin. Default: ``0``.
        graph_scales (str): ``current`` or ``last_step``, for layers with recipe ``tensorwise`` in
            graphs of torch.compile. With ``last_step`` they cast inputs and gradients with the last
            step's amax times a margin of 4 (inputs) or 8 (gradients), so that no cast reads its
            tensor for an amax first. Larger values saturate, which is noticed a step later; the
            step after that casts with current scales, as the first one does. Eager code always
            computes scales from the current tensors. Default: ``"current"``.
        tokens (int): number of tokens with which recipe ``auto`` measures, at least 1. Set it to
            the tokens of one rank's micro-batch. Default: ``8192``.
        opt_level (str): ``O1``: FP8 GEMMs only; weights, gradients and optimizer states stay as you
            have them. ``O2``: Adam and AdamW also keep 8-bit moments, and float32 weights are
            stored as BF16 plus a residual, 7.1 bytes per parameter in all. ``O3``: the gradients of
            FP8 layers use 8 bits, too, 6.1 bytes in all. Default: ``"O2"``.
        split_weights (bool): whether O2 and O3 store float32 weights in two halves. Turn it off
            (10.1 bytes) if the model's own code computes with them. Default: ``True``.
        gradient_release (bool): run the optimizer in backward and free each gradient at once, which
            saves 2 bytes per parameter at O2 and 1 at O3. It refuses clipping by global norm,
            accumulation over micro-batches, manual optimization and DDP. Default: ``False``.
        cache_weights (bool | str): keep the FP8 payload of a weight from one optimizer step, which
            writes it, to the next, instead of casting the weight in every forward and backward.
            This takes one more byte per parameter (8.1 at O2) and gives the same bits. Graphs of
            torch.compile take the payload as an input. ``"auto"`` keeps payloads that serve both
            passes (``tensorwise``, ``delayed``, ``blockwise``) if they take at most an eighth of
            the memory that is free for activations when the optimizer is converted; never on the
            CPU. True also keeps payloads that serve forward only. It needs float32 weights stored
            in two halves, because these notice each write. Default: ``"auto"``.
        keep_eval_weights (bool): keep the FP8 payload of a weight between forwards without
            gradients: one byte per parameter, while no gradients exist. In evaluation mode this
            covers weights stored in two halves. Within `torch_fp8.rollout` and transformers'
            ``generate``, where nothing writes to weights, it covers all. Default: ``True``.
        update_clipping (bool): divide a parameter's learning rate by the RMS of ``g / sqrt(v)`` if
            that is above 1, as StableAdamW does (arXiv 2304.13013). Default: ``False``.
        checkpoint_states (str): format of the moments of Adam and AdamW in
            ``optimizer.state_dict()``. ``float32``: stock AdamW can load it. ``fp8``: codes and
            scales as they are in memory, 2.1 bytes per parameter instead of 8. Stock AdamW fails on
            it with ``KeyError: 'exp_avg'`` until ``torch-fp8 convert-optimizer`` has converted the
            file. Loading accepts both, whatever this option says. Default: ``"float32"``.
        seed (int): seed of stochastic rounding in the optimizer, equal on all ranks and kept in
            checkpoints. Default: ``0``.
        frozen_weights (str): storage of frozen weights at O2 and O3. ``auto``: FP8 only, one byte
            per parameter, if they are proven frozen: PEFT froze them, or a host prepared the model
            for evaluation and no optimizer has it. ``fp8``: FP8 only for all FP8 layers whose
            weights do not require gradients; if you ask for gradients later, the weight gets its
            dtype back, with a warning. ``keep``: unchanged. Default: ``"auto"``.
        merge_aware (bool): train LoRA over an FP8 base as it will be merged and exported: forward
            multiplies by the merged weight, cast to FP8, and the gradient passes the rounding
            unchanged. It needs a frozen FP8 base and one plain adapter without dropout. Default:
            ``False``.
        communication (str): format of gradients, and of the weights that FSDP2 gathers, between
            ranks. ``fp8``: 8-bit values in groups of 32 with power-of-two scales, 1.03 bytes each,
            summed in float32; your own DDP communication hook takes precedence. ``off``: torch's
            collectives in the tensors' dtype. ``auto``: with NCCL at O1 and O2, ``fp8`` if it was
            measured faster than BF16 on the links of this job; otherwise ``fp8``, unmeasured.
            Default: ``"auto"``.
        agreement_timeout (int | None): seconds for which ranks wait for each other before the first
            step, to compare versions and configurations; the error then names the ranks that did
            not enable FP8. None means 120 plus 1 for each rank, or the timeout of the process group
            if that is shorter. Default: ``None``.
        smooth_swiglu (bool): Smooth-SwiGLU (arXiv 2409.12517): cast the input of the down
            projection of a gated MLP with one scale per channel, a power of two computed from the
            current tokens, and multiply the weight by its reciprocal as it is cast. The function
            and the checkpoint stay the same, and outliers of aligned channels no longer flush the
            other channels to zero. Gated MLPs are found by structure, with any activation.
            The monitor shows where a model needs it. Default: ``False``.
        save_activations (str): format of what norms and gated MLPs save for backward: ``fp8`` (E4M3
            with a scale for each 128 elements) or ``bf16`` (their inputs, unchanged). Linear layers
            save the FP8 payload that their GEMM reads, except with ``wgrad="bf16"``. Default:
            ``"fp8"``.
        bf16_last (float): share of the last optimizer steps whose forward runs in BF16, 0 to 1; at
            least one step if it is above 0. Backward, memory and the optimizer stay the same, and
            evaluations in these steps run in BF16, too. Lightning's and transformers' Trainers know
            the number of steps; other loops call `torch_fp8.set_forward_precision`. Weights stored
            as FP8 only stay in FP8. See docs/loss.md. Default: ``0.0``.
        eval_fp8 (bool): whether a module in evaluation mode runs its forward GEMM in FP8, too.
            Default: ``True``.
        skip (tuple[str, ...]): patterns of the qualified names of modules that stay in high
            precision. A pattern matches whole components, anywhere in the name, and everything
            below: ``layers.2`` matches ``model.layers.2.mlp.up_proj`` but not ``model.layers.20``.
            ``*`` matches within a component, ``**`` across components. A value replaces the
            default: list ``lm_head`` again to keep it. Default: ``("lm_head",)``.
        overrides (dict[str, typing.Any]): other options for some layers, by patterns as in `skip`:
            ``{"layers.0": {"recipe": "blockwise"}, "down_proj": {"recipe": "bf16"}}``. A value may
            set ``recipe`` (a named one, or ``bf16`` or None for high precision), ``wgrad``,
            ``grad_format``, ``fast_accum``, ``amax_history_len``, ``amax_compute_algo``,
            ``margin``, ``smooth_swiglu`` and ``eval_fp8``. If several patterns match, later ones
            win, and `skip` wins over all. Weights stored as FP8 only keep their own recipe.
            Default: ``{}``.
        loss_head (str): the output layer together with its cross entropy. ``bf16`` computes the
            loss and its gradients in chunks of tokens, so that no logits are in memory, with the
            products of an unconverted layer. ``fp8`` runs these three products in FP8, too.
            ``auto``: ``fp8`` for a layer whose weight is frozen in a model that is trained, as
            under LoRA, else ``bf16``; the conversion decides, and nothing changes it within a run.
            ``off``: the layer returns logits as without this package. The pattern ``lm_head`` of
            `skip` has no effect on the head; any other pattern of `skip` that names it, or an
            override to high precision, leaves it unchanged. ``skip=()`` means ``fp8``. See
            docs/loss_head.md. Default: ``"auto"``.
        emulate (bool): run GEMMs that the hardware cannot run natively through the reference path.
            The CPU always emulates. Default: ``False``.
        backend (str): implementation of the GEMMs of linear layers: ``torch``, with this package's
            casts, or ``transformer-engine``, NVIDIA's package with its own casts and recipes, which
            leaves norms and gated MLPs unchanged and runs linear layers only, on CUDA, on one
            device or under DDP. Default: ``"torch"``.
        monitor (int): number of steps between two measurements of what FP8 preserves of each
            layer's tensors; 0 is off. A statistic that crosses its bound gives a warning. The host
            logs the numbers under ``fp8/<layer>/<tensor>/<statistic>``, and the run's folder has
            them for ``torch-fp8 report``. Cost: benchmarks/results/monitor_overhead.csv. Default:
            ``0``.
        monitor_probes (tuple[str, ...]): more expensive statistics: ``clip_search``, the clip of
            each gradient that changes its direction least, and ``logit_sharpness``, the sharpness
            of the loss around the logits of a batch's last token. Default: ``()``.
        on_alarm (str): reaction of a layer whose statistics cross a bound. ``warn`` changes
            nothing, ``bf16`` runs it in high precision, and the name of a recipe runs it with that
            recipe. The layer returns after `fallback_steps` steps without a crossing, and waits
            twice as long after each further crossing. Default: ``"warn"``.
        fallback_steps (int): least number of steps for which a layer stays out of FP8; at least 1.
            Default: ``100``.
    Raises:
        ValueError: a value is unknown (the message lists the valid ones), or options contradict
            each other.
        TypeError: an option is unknown, or a value has the wrong type.
    """

    recipe: str = option("auto", choices=("auto", *RECIPES), of="layer")
    wgrad: str = option("fp8", choices=("fp8", "bf16"), of="layer torch")
    grad_format: str | None = option(None, choices=(None, *FORMATS), of="layer")
    fast_accum: tuple[str, ...] = option(("fprop",), choices=GEMMS, of="layer torch")
    amax_history_len: int = option(1024, least=1, of="layer delayed")
    amax_compute_algo: str = option("max", choices=("max", "most_recent"), of="layer delayed")
    margin: int = option(
        0,
        least=0,
        most=8,
        why="E4M3 has 17 powers of two, and the margin takes as many of them",
        of="layer delayed",
    )
    graph_scales: str = option("current", choices=("current", "last_step"), of="torch")
    tokens: int = option(8192, least=1, of="auto")
    opt_level: str = option("O2", choices=("O1", "O2", "O3"))
    split_weights: bool = option(True, of="optimizer")
    gradient_release: bool = option(False, of="optimizer adam")
    cache_weights: bool | str = option("auto", choices=("auto", True, False))
    keep_eval_weights: bool = option(True, of="torch")
    update_clipping: bool = option(False, of="optimizer adam")
    checkpoint_states: str = option("float32", choices=("float32", "fp8"), of="optimizer adam")
    seed: int = option(0, of="optimizer")
    frozen_weights: str = option("auto", choices=("auto", "fp8", "keep"), of="torch")
    merge_aware: bool = option(False, of="torch")
    communication: str = option("auto", choices=("auto", "fp8", "off"))
    agreement_timeout: int | None = option(None, least=1)
    smooth_swiglu: bool = option(False, of="layer torch")
    save_activations: str = option("fp8", choices=("fp8", "bf16"))
    bf16_last: float = option(0.0, least=0, most=1, why="it is a share", of="torch")
    eval_fp8: bool = option(True, of="layer")
    skip: tuple[str, ...] = option(("lm_head",))
    overrides: dict[str, Any] = field(default_factory=Overrides)
    loss_head: str = option("auto", choices=("auto", "bf16", "fp8", "off"), of="torch")
    emulate: bool = option(False, of="torch")
    backend: str = option("torch", choices=("torch", "transformer-engine"))
    monitor: int = option(0, least=0, of="torch")
    monitor_probes: tuple[str, ...] = option((), choices=PROBES, of="monitor")
    on_alarm: str = option("warn", choices=ON_ALARM, of="monitor")
    fallback_steps: int = option(100, least=1, of="monitor")

    def __post_init__(self) -> None:
        check_options(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_DEFAULTS | without_removed(state, _DEFAULTS))

    @property
    def keeps_residuals(self) -> bool:
        """Whether large weights have bits below BF16; otherwise they stay as they are."""
        return self.opt_level != "O1" and self.split_weights

    def overridden(self, options: Mapping[str, Any] | None) -> "FP8Config":
        """Return this configuration with the `options` of an override applied.

        If the override names another recipe, the options of delayed scaling and of ``auto``, and a
        gradient format that the new recipe cannot run, return to their defaults. An override to
        high precision changes nothing here.

        Raises:
            ValueError, TypeError: see `FP8Config`.
        """
        changes: dict[str, Any] = {"overrides": {}}
        if is_high_precision(options):
            options = {}
        assert options is not None
        if options.get("recipe", self.recipe) != self.recipe:
            left = [*named(FP8Config, "delayed"), *named(FP8Config, "auto")]
            if options["recipe"] in E4M3_ONLY:
                left.append("grad_format")
            changes.update((name, _DEFAULTS[name]) for name in left)
        if options.get("wgrad") == "bf16":
            changes["fast_accum"] = tuple(gemm for gemm in self.fast_accum if gemm != "wgrad")
        return replace(self, **{**changes, **options})

    def to_json(self) -> str:
        """Return all fields as a JSON object, which `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> "FP8Config":
        """Read a configuration from JSON text, a path to a JSON file, or the name of a recipe.

        The JSON is an object of field names and values. A recipe's name means ``{"recipe": name}``.

        Raises:
            TypeError: `source` is neither text nor a path.
            ValueError: `source` is none of these, or has an unknown field or an invalid value.
        """
        values = read_json(source)
        if unknown := unknown_options(values, _DEFAULTS, "FP8Config"):
            raise ValueError(unknown)
        return cls(**values)

    @classmethod
    def from_env(cls) -> "FP8Config | None":
        """Read the variable ``TORCH_FP8_CONFIG`` as `from_json` does, or return None if unset."""
        source = os.environ.get(ENV_VAR, "").strip()
        if not source:
            return None
        try:
            return cls.from_json(source)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{ENV_VAR}: {error}") from error


def config_or_default(config: object) -> FP8Config:
    """Resolve the `config` argument of a public function to an `FP8Config`.

    Args:
        config: an `FP8Config`, the name of a recipe, or None for ``TORCH_FP8_CONFIG``, or the
            defaults if that is unset.
    Raises:
        TypeError: `config` is anything else; the message shows what to write instead.
        ValueError: ``TORCH_FP8_CONFIG`` is not a valid configuration.
    """
    if isinstance(config, FP8Config):
        return config
    if config is None:
        return FP8Config.from_env() or FP8Config()
    recipes = ("auto", *RECIPES)
    if isinstance(config, str) and config in recipes:
        return FP8Config(recipe=config)
    names = f"({', '.join(recipes)}){suggestion(config, recipes)}"
    way_out = f"FP8Config(...), or the name of a recipe {names}"
    if isinstance(config, Mapping):
        way_out = "FP8Config(**options)"
    elif isinstance(config, os.PathLike) or (isinstance(config, str) and set(config) & set("{/.")):
        way_out = "FP8Config.from_json(text_or_path)"
    raise TypeError(f"config is {config!r}, of type {type(config).__name__}; pass {way_out}")


_DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(FP8Config)
}


naming_valid_options(FP8Config, _DEFAULTS)


def given_config(
    config: FP8Config | None, options: Mapping[str, Any], taker: str
) -> FP8Config | None:
    """Return the configuration from a call ``taker(config, **options)``, which passes either.

    Raises:
        TypeError: `config` is not an FP8Config, or an option is not one of its fields.
        ValueError: the call passes both, or an option has an invalid value.
    """
    if config is not None and not isinstance(config, FP8Config):
        hint = f"; did you mean {taker}(recipe={config!r})?" if isinstance(config, str) else ""
        raise TypeError(f"{taker} takes an FP8Config or its fields, got {config!r}{hint}")
    if not options:
        return config
    names = ", ".join(options)
    if config is not None:
        raise ValueError(
            f"{taker} takes an FP8Config or its fields, got both: {config} and {names}; put "
            f"{names} into the FP8Config"
        )
    return FP8Config(**options)
