"""Sections whose keys depend on one of their keys: `task` on `kind`, `correction` on `method`.

The models come from a registry, so installed packages can add some. They are looked up when a configuration
is read, not when this package is imported: the modules that define them import their base from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from leeway.config.base import Section
from leeway.registry import Registry

S = TypeVar("S", bound=Section)
UNKNOWN_NAME = "unknown_name"
"""Type of pydantic's error for a name that is not registered; its message is complete."""


class HasSettings(Protocol):
    """An entry of a registry with the model of a section; its field `key` is a Literal of the name."""

    @property
    def settings(self) -> type[Any]: ...


class Choice(Generic[S]):
    """Annotation of a section: its model is the one registered under the value of `key`.

    KIND = Choice(TaskConfig, "kind", "reasoning_gym", find_kinds)
    task: Annotated[TaskConfig, KIND]

    `base`: what the models have in common. `default`: the name if `key` is not given. `registry`: called when
    a configuration is read. Validation, dumps and the JSON schema are those of the chosen model.
    """

    def __init__(self, base: type[S], key: str, default: str, registry: Callable[[], Registry[Any]]) -> None:
        self.base, self.key, self.default, self._registry = base, key, default, registry

    @property
    def registry(self) -> Registry[Any]:
        return self._registry()

    def model(self, name: str) -> type[S]:
        """The model of `name`. Raises UsageError if it is not registered."""
        entry: HasSettings = self.registry[name]
        return entry.settings

    @property
    def common_keys(self) -> list[str]:
        """Keys that all models have, without `key` itself."""
        return [key for key in self.base.model_fields if key != self.key]

    def own_keys(self, name: str) -> list[str]:
        """Keys that the model of `name` has beyond the common ones, those of its own class first."""
        model = self.model(name)
        classes = [cls for cls in model.__mro__ if issubclass(cls, self.base)]
        keys = dict.fromkeys(key for cls in classes for key in cls.__annotations__)
        return [k for k in keys if k in model.model_fields and k not in self.base.model_fields]

    def build(self, value: Any = None) -> S:
        """The section from plain values (None: no value given); a section that is already built is returned.

        Raises ValidationError, also for a name that is not registered.
        """
        if isinstance(value, self.base):
            return value
        data = {} if value is None else value
        if not isinstance(data, Mapping):
            return self.base.model_validate(data)  # raises: not a mapping
        name = data.get(self.key, self.default)
        if not isinstance(name, str) or name not in self.registry:
            text = self.registry.unknown(str(name)[:60])
            problem = PydanticCustomError(UNKNOWN_NAME, "{text}", {"text": text})
            raise ValidationError.from_exception_data(
                self.base.__name__, [{"type": problem, "loc": (self.key,), "input": name}]
            )
        return self.model(name).model_validate(dict(data))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not a tagged union of pydantic's: that would import all models, and those of installed packages,
        # whenever a configuration is read.
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_plain_validator_function(self.build, serialization=as_it_is)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        choices: dict[Any, CoreSchema] = {
            name: self.model(name).__pydantic_core_schema__ for name in self.registry
        }
        union = handler(core_schema.tagged_union_schema(choices, discriminator=self.key))
        for name, reference in zip(choices, union["oneOf"], strict=True):
            if name != self.default:  # else values without the key would match several models
                model = handler.resolve_ref_schema(reference)
                model["required"] = [self.key, *model.get("required", [])]
        return union


def choice_of(metadata: list[Any]) -> Choice[Section] | None:
    """The Choice among the annotations of a field (`FieldInfo.metadata`)."""
    return next((item for item in metadata if isinstance(item, Choice)), None)
