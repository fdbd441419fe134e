"""The section `correction`: what all methods share, and how the settings of the chosen one are found.

Each method of `leeway.corrections.methods` (and of installed packages) brings its own settings model, a
subclass of `CorrectionConfig`. The section is the union of these models, discriminated by `method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from leeway.config.base import Section

DEFAULT_METHOD = "dlc"
PPO_CLIP = (0.2, 0.2, 3.0)
"""Clip range of PPO (low, high, dual) that `lag/clip_fraction` is measured with for methods without one."""


class CorrectionConfig(Section):
    """How the trainer corrects for the mismatch between sampler and trainer."""

    method: str
    """The correction; `leeway corrections` lists them, with the keys of each."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards become advantages: (R - mean) / std of the group, R - mean, or R - mean of the others."""
    std_floor: float = Field(default=1e-4, gt=0)
    """Minimum standard deviation of a group's rewards with `grpo`; below it the group's advantages are 0."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """How token losses become a scalar, always by the requested counts; null: the method's default."""

    @property
    def centre(self) -> str:
        """What is subtracted at each prefix: discrepancy, weighted, plain or none."""
        return "none"

    @property
    def needs_head(self) -> bool:
        """True when the method reads more of the sampler's distribution than the drawn token."""
        return self.centre != "none"

    @property
    def needs_sync_tail(self) -> bool:
        """True when the centre off the reported head follows the trainer on the sampler's weights."""
        return False

    @property
    def ppo_clip(self) -> tuple[float, float, float]:
        """(low, high, dual) of the clip that `lag/clip_fraction` is measured with."""
        return PPO_CLIP

    def common(self) -> dict[str, Any]:
        """Values of the keys that all methods have, without `method`."""
        return {key: getattr(self, key) for key in COMMON_KEYS}


COMMON_KEYS = tuple(key for key in CorrectionConfig.model_fields if key != "method")


def own_keys(settings: type[CorrectionConfig]) -> list[str]:
    """Keys of a method that are not common to all methods; those of its class come first."""
    classes = [base for base in settings.__mro__ if issubclass(base, CorrectionConfig)]
    keys = dict.fromkeys(key for base in classes for key in base.__annotations__)
    return [k for k in keys if k in settings.model_fields and k not in CorrectionConfig.model_fields]


def build_correction(value: Any = None) -> CorrectionConfig:
    """The settings of the method that `value` names (default: dlc) from plain data.

    Settings that are built already are returned as they are. Raises ValidationError, also for a method that
    does not exist.
    """
    from leeway.corrections.registry import METHODS

    if isinstance(value, CorrectionConfig):
        return value
    data = {} if value is None else value
    if not isinstance(data, Mapping):
        return CorrectionConfig.model_validate(data)  # raises: not a mapping
    name = data.get("method", DEFAULT_METHOD)
    if not isinstance(name, str) or name not in METHODS:
        text = METHODS.unknown(str(name)[:60])
        problem = PydanticCustomError("unknown_method", "{text}", {"text": text})
        raise ValidationError.from_exception_data(
            "correction", [{"type": problem, "loc": ("method",), "input": name}]
        )
    settings: type[CorrectionConfig] = METHODS[name].settings
    return settings.model_validate(data)


class _ByMethod:
    """Validates with the settings model of the method; the JSON schema is the union of these models."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not a tagged union of pydantic's: that would import all methods, and those of installed packages,
        # whenever a configuration is read.
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_plain_validator_function(build_correction, serialization=as_it_is)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        from leeway.corrections.registry import METHODS

        models = {name: METHODS[name].settings for name in METHODS}
        choices: dict[Any, CoreSchema] = {
            name: model.__pydantic_core_schema__ for name, model in models.items()
        }
        union = handler(core_schema.tagged_union_schema(choices, discriminator="method"))
        for name, reference in zip(models, union["oneOf"], strict=True):
            if name != DEFAULT_METHOD:  # else settings without a method would match every model
                handler.resolve_ref_schema(reference)["required"] = ["method"]
        return union


AnyCorrection = Annotated[CorrectionConfig, _ByMethod()]
"""Type of a field that holds the settings of any method."""
