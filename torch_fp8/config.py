"""`FP8Config`: every choice a user has, in one frozen, printable object that goes through JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from torch_fp8.quantization.contradictions import check_contradictions
from torch_fp8.quantization.formats import FORMATS
from torch_fp8.quantization.monitor_options import (
    ON_ALARM,
    ON_LOSS_SPIKE,
    PROBES,
    check_monitor,
)
from torch_fp8.quantization.option_values import checked, named, option, read_json
from torch_fp8.quantization.overrides import Overrides, check_override, is_high_precision
from torch_fp8.quantization.recipe import E4M3_ONLY, GEMMS, RECIPES, SAVE_FORMATS
from torch_fp8.quantization.split_float import RESIDUAL_BITS
from torch_fp8.quantization.suggestions import naming_valid_options, suggestion, unknown_options

ENV_VAR = "TORCH_FP8_CONFIG"
_GONE = {
    "fp8-lm": "FP8-LM's rule with one scale per tensor and a sum in FP8, existed for comparison "
    "and was removed; use 'fp8', which is more accurate at the same bytes, or register your own "
    "communication hook on DDP"
}


@dataclass(frozen=True)
class FP8Config:
    """What runs in FP8, and how.

    Attributes:
        recipe (str): ``auto``, ``tensorwise``, ``delayed``, ``rowwise``, ``blockwise`` or
            ``mxfp8``. ``auto``: of tensorwise, rowwise and blockwise, which keep parity with BF16,
            the one that is measured to be the fastest on this card and this model's layers; layers
            that are no faster in FP8 stay in BF16. Where FP8 is emulated nothing is measured, and
            it is tensorwise. The start-up summary says what it chose. A named recipe runs as named
            or raises. Default: ``"auto"``.
        wgrad (str): ``fp8`` or ``bf16``: the precision of the weight-gradient GEMM (``bf16``:
            SwitchBack). Default: ``"fp8"``.
        grad_format (str | None): ``e5m2`` or ``e4m3`` for gradients. None: by recipe (E5M2 for
            tensorwise and delayed, whose one scale needs the range; E4M3 for finer scales).
            Default: ``None``.
        fast_accum (tuple[str, ...]): the GEMMs, of ``fprop``, ``dgrad`` and ``wgrad``, that use the
            tensor core's fast accumulation. The default is the forward one, as Transformer Engine
            and torchao do. Block-scaled GEMMs (``blockwise``, ``mxfp8``) are promoted to float32
            after every block and have no such choice. Default: ``("fprop",)``.
        amax_history_len (int): for recipe ``delayed``: the number of past amaxes that the scale
            looks at, at least 1. Default: ``1024``.
        amax_compute_algo (str): for recipe ``delayed``: ``max`` of the history, or its
            ``most_recent`` entry. Default: ``"max"``.
        margin (int): for recipe ``delayed``: headroom in powers of two, 0 to 8; the scale is
            multiplied by 2^margin. Default: ``0``.
        tokens (int): for recipe ``auto``: the tokens that it measures with, at least 1; those of a
            rank's micro-batch are best. Default: ``8192``.
        opt_level (str): ``O1``: FP8 GEMMs; weights, gradients and optimizer states as the user has
            them. ``O2``: Adam and AdamW keep 8-bit moments, and float32 weights are stored as BF16
            and a residual, 7.1 bytes per parameter in all. ``O3``: the gradients of FP8
            layers take 8 bits, too, 6.1 bytes. Default: ``"O2"``.
        split_weights (bool): whether float32 weights are stored in two halves at O2 and O3, or
            stay (10.1 bytes), for models whose own code computes with them. Default: ``True``.
        residual_bits (int): bits of a weight below BF16 that the optimizer keeps: 8, 4 or 0. 8 has
            no visible loss against float32 at learning rates of 1e-6; fewer lose updates where the
            learning rate is small, of which a warning tells. Default: ``8``.
        moment_bits (int): bits of Adam's first moment for weights of FP8 layers: 8, or 4 (0.4 bytes
            per parameter fewer): integers of its ratio to the root of the second one, which keeps 8
            bits. Embeddings, the head, odd and small parameters keep 8, as do groups with a beta1
            above 0.9. Default: ``8``.
        gradient_release (bool): run the optimizer in backward and free each gradient at once: 2
            bytes per parameter fewer at O2, 1 at O3. Not with clipping by global norm, accumulation
            over micro-batches, manual optimization or DDP: refused there. Default: ``False``.
        cache_weights (bool | str): keep the FP8 payload of a weight from one optimizer step, which
            writes it, to the next, instead of casting it in every forward: one byte per parameter
            more. ``"both"``: its transpose, too, which backward takes: two bytes. It takes float32
            weights, which are stored in two halves and see each write. Scales of weights are powers
            of two then. Not with recipe ``delayed``; within torch.compile weights are cast as
            without it. Default: ``False``.
        keep_eval_weights (bool): keep the FP8 payload of a weight between forwards without
            gradients: one byte per parameter, while no gradients exist. In evaluation mode of
            weights in two halves; of all within `torch_fp8.rollout` and transformers' ``generate``,
            where nobody writes. Default: ``True``.
        update_clipping (bool): StableAdamW's: divide a parameter's learning rate by the RMS of
            ``g / sqrt(v)`` where that is above 1 (arXiv 2304.13013). Default: ``False``.
        checkpoint_states (str): how ``optimizer.state_dict()`` has the moments of Adam and AdamW.
            ``float32``: as stock AdamW, which opens it. ``fp8``: codes and scales as they are in
            memory, 2.1 bytes per parameter instead of 8; ``torch-fp8 convert-optimizer`` makes
            stock's format of it. Both are loaded whatever this says. Default: ``"float32"``.
        seed (int): the seed of rounding in the optimizer. Equal on all ranks; kept in
            checkpoints. Default: ``0``.
        frozen_weights (str): how weights that nobody trains are stored at O2 and O3. ``auto``: as
            FP8 alone, one byte per parameter, where they are proven frozen: by PEFT, or because a
            host has prepared the model for evaluation and no optimizer has it. ``fp8``: all FP8
            layers whose weights do not require gradients; asking for gradients later gives a weight
            its dtype back, with a warning. ``keep``: as they are. Default: ``"auto"``.
        merge_aware (bool): train LoRA over an FP8 base as it will be merged and exported: forward
            multiplies by the merged weight, cast to FP8, and the gradient passes the rounding.
            Needs a frozen FP8 base, one plain adapter and no dropout in it. Default: ``False``.
        save_format (str | None): the FP8 format in which ``save_pretrained`` of transformers and
            ``save_model`` of Accelerate write a model that was prepared, for inference engines:
            ``fine-grained`` (recipe blockwise), ``compressed-tensors`` (tensorwise, rowwise,
            blockwise, mxfp8) or ``modelopt`` (delayed); see `torch_fp8.export`. The Trainer's
            checkpoints, from which training goes on, adapters and models that they were merged into
            are saved as without it. None: the dtype that the weights had. Default: ``None``.
        communication (str): how gradients, and the weights that FSDP2 gathers, travel between
            ranks. ``fp8``: 8-bit values in groups of 32 with power-of-two scales, 1.03 bytes each,
            summed in float32; a DDP communication hook of your own wins. ``off``: torch's own
            collectives, in the tensors' dtype. ``auto``: ``fp8`` where it was measured faster than
            BF16 on the links of this job, with NCCL at O1 and O2; else ``fp8``. Default:
            ``"auto"``.
        agreement_timeout (int | None): seconds for which ranks wait for each other before the first
            step, to compare versions and configurations; then an error names the ranks that have
            not asked for FP8. None: 120, and 1 for each rank, or the timeout of the process group
            if that is shorter. Default: ``None``.
        smooth_swiglu (bool): Smooth-SwiGLU (arXiv 2409.12517): cast what goes into the down
            projection of a gated MLP with a scale for each channel, a power of two from the tokens
            at hand, whose reciprocal goes into the weight as it is cast. The function and the
            checkpoint stay the same; outliers of aligned channels no longer flush the others. Found
            by structure, whatever the activation. ``torch-fp8 check`` says where a model needs it.
            Default: ``False``.
        save_activations (str): ``fp8`` or ``bf16``: what norms and gated MLPs keep for backward,
            E4M3 with a scale for each 128 elements or their inputs as they are. Linear layers keep
            the FP8 payload that their GEMM takes, except for ``wgrad="bf16"``. Default: ``"fp8"``.
        save_attention (str): ``bf16``, ``qkv`` or ``qkvo``: what attention of transformers' models
            keeps of q, k and v for backward, their own dtype or E4M3 with a scale for each token
            and head. Forward multiplies the same rounded values. With ``qkvo`` attention keeps its
            output as the FP8 payload that the layer behind it keeps anyway. Default: ``"bf16"``.
        eval_fp8 (bool): whether a module in evaluation mode runs its forward GEMM in FP8 too.
            Default: ``True``.
        skip (tuple[str, ...]): patterns on the qualified name of modules that stay in high
            precision. A pattern matches whole components, anywhere in the name, and everything
            below: ``layers.2`` matches ``model.layers.2.mlp.up_proj`` and not ``model.layers.20``.
            ``*`` matches within a component, ``**`` across components. A value replaces the
            default: name ``lm_head`` again to keep it. Default: ``("lm_head",)``.
        overrides (dict[str, typing.Any]): other options for some layers, by patterns as of `skip`:
            ``{"layers.0": {"recipe": "blockwise"}, "down_proj": {"recipe": "bf16"}}``. A value has
            any of ``recipe`` (a named one, or ``bf16`` for high precision, as None is), ``wgrad``,
            ``grad_format``, ``fast_accum``, ``amax_history_len``, ``amax_compute_algo``,
            ``margin``, ``smooth_swiglu`` and ``eval_fp8``. Where several patterns match, the later
            ones win, and `skip` wins over all. Weights that are stored as FP8 alone keep their own
            recipe. Default: ``{}``.
        emulate (bool): run GEMMs that the hardware cannot run natively through the reference path.
            The CPU always emulates. Default: ``False``.
        backend (str): who runs the GEMMs of linear layers: ``torch``, with casts of this package,
            or ``transformer-engine``, NVIDIA's package of that name with casts and recipes of its
            own. Norms and gated MLPs stay as they are then. Linear layers only, on CUDA, on one
            device or under DDP. Default: ``"torch"``.
        monitor (int): measure every so many steps what FP8 keeps of each layer's tensors, and warn
            where a bound is crossed; 0 is off. The numbers stand in the host's own log under
            ``fp8/<layer>/<tensor>/<statistic>``, and in the run's folder for ``torch-fp8 report``.
            What it takes: benchmarks/results/monitor_overhead.csv. Default: ``0``.
        monitor_probes (tuple[str, ...]): what costs more: ``clip_search``, the clip of each
            gradient that turns it least, and ``logit_sharpness``, how sharp the loss is around the
            logits of a batch's last token. Default: ``()``.
        on_alarm (str): what a layer does whose statistics cross a bound: ``warn`` changes nothing,
            ``bf16`` runs it in high precision, the name of a recipe runs it with that one. It
            returns after `fallback_steps` steps without a crossing, and waits twice as long after
            each further one. Default: ``"warn"``.
        on_loss_spike (str): what happens where the loss jumps: ``warn``; ``skip``: the step updates
            nothing; ``bf16``: all layers run in high precision for `fallback_steps` steps;
            ``restore``: the step updates nothing, and the run goes back to the host's last
            checkpoint, with the data that comes next. All but ``warn`` wait for the loss of each
            step. Default: ``"warn"``.
        fallback_steps (int): how long a layer, or all of them, stay away from FP8 at least; at
            least 1. Default: ``100``.
    Raises:
        ValueError: an unknown value (the message names the valid ones), or options that
            contradict each other.
        TypeError: an unknown option, or a value of the wrong type.
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
    tokens: int = option(8192, least=1, of="auto")
    opt_level: str = option("O2", choices=("O1", "O2", "O3"))
    split_weights: bool = option(True, of="optimizer")
    residual_bits: int = option(8, choices=RESIDUAL_BITS, of="optimizer")
    moment_bits: int = option(8, choices=(8, 4), of="optimizer adam")
    gradient_release: bool = option(False, of="optimizer adam")
    cache_weights: bool | str = option(False, choices=("both",), of="optimizer torch")
    keep_eval_weights: bool = option(True, of="torch")
    update_clipping: bool = option(False, of="optimizer adam")
    checkpoint_states: str = option("float32", choices=("float32", "fp8"), of="optimizer adam")
    seed: int = option(0, of="optimizer")
    frozen_weights: str = option("auto", choices=("auto", "fp8", "keep"), of="torch")
    merge_aware: bool = option(False, of="torch")
    save_format: str | None = option(None, choices=(None, *SAVE_FORMATS), of="torch")
    communication: str = option("auto", choices=("auto", "fp8", "off"), gone=_GONE)
    agreement_timeout: int | None = option(None, least=1)
    smooth_swiglu: bool = option(False, of="layer torch")
    save_activations: str = option("fp8", choices=("fp8", "bf16"))
    save_attention: str = option("bf16", choices=("bf16", "qkv", "qkvo"))
    eval_fp8: bool = option(True, of="layer")
    skip: tuple[str, ...] = option(("lm_head",))
    overrides: dict[str, Any] = field(default_factory=Overrides)
    emulate: bool = option(False, of="torch")
    backend: str = option("torch", choices=("torch", "transformer-engine"))
    monitor: int = option(0, least=0)
    monitor_probes: tuple[str, ...] = option((), choices=PROBES, of="monitor")
    on_alarm: str = option("warn", choices=ON_ALARM, of="monitor")
    on_loss_spike: str = option("warn", choices=ON_LOSS_SPIKE, of="monitor")
    fallback_steps: int = option(100, least=1, of="monitor")

    def __post_init__(self) -> None:
        for of_field in fields(self):
            if of_field.name != "overrides":
                value = checked(of_field, getattr(self, of_field.name))
                object.__setattr__(self, of_field.name, value)
        overrides = Overrides.checked(self.overrides, named(FP8Config, "layer"))
        object.__setattr__(self, "overrides", overrides)
        check_contradictions(self)
        check_monitor(self)
        for pattern, options in self.overrides.items():
            check_override(self, pattern, options)

    @property
    def large_residual_bits(self) -> int | None:
        """The residual bits of large BF16 weights; None: weights are left as they are."""
        return self.residual_bits if self.opt_level != "O1" and self.split_weights else None

    def overridden(self, options: Mapping[str, Any] | None) -> "FP8Config":
        """Return this configuration with `options` of an override in place of its own.

        Another recipe does not take over what belongs to this one: the options of delayed scaling
        and of ``auto``, and a format of gradients that it cannot run. High precision changes
        nothing here.

        Raises:
            ValueError: see `FP8Config`.
            TypeError: see `FP8Config`.
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
            gemms = tuple(gemm for gemm in self.fast_accum if gemm != "wgrad")
            changes["fast_accum"] = gemms
        return replace(self, **{**changes, **options})

    def to_json(self) -> str:
        """Return all fields as a JSON object, which `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> "FP8Config":
        """Read a JSON object of field names and values, given as text or as the path of a file.

        The name of a recipe stands for ``{"recipe": name}``.

        Raises:
            ValueError: none of these, an unknown field, or a bad value.
        """
        values = read_json(source)
        if unknown := unknown_options(values, _DEFAULTS, "FP8Config"):
            raise ValueError(unknown)
        return cls(**values)

    @classmethod
    def from_env(cls) -> "FP8Config | None":
        """Return the configuration in the environment variable ``TORCH_FP8_CONFIG``, None if
        unset.
        """
        source = os.environ.get(ENV_VAR, "").strip()
        if not source:
            return None
        try:
            return cls.from_json(source)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{ENV_VAR}: {error}") from error


def config_or_default(config: object) -> FP8Config:
    """Return the configuration that a public function was given, or the environment's or the
    defaults.

    Args:
        config: an `FP8Config`, the name of a recipe, or None.
    Raises:
        TypeError: anything else; the message says what to write instead.
        ValueError: ``TORCH_FP8_CONFIG`` holds no valid configuration.
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
    raise TypeError(f"config is {config!r}, a {type(config).__name__}; pass {way_out}")


_DEFAULTS: dict[str, Any] = {
    f.name: f.default if f.default_factory is MISSING else f.default_factory()
    for f in fields(FP8Config)
}


naming_valid_options(FP8Config, _DEFAULTS)


def given_config(
    config: FP8Config | None, options: Mapping[str, Any], taker: str
) -> FP8Config | None:
    """Return the configuration that a host's ``taker(config, **options)`` was given, whole or in
    fields.

    Raises:
        TypeError: `config` is not an FP8Config; an option is not a field.
        ValueError: both were given; an option's value is not valid.
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
