"""Sections whose keys depend on one of their keys: `task` on `kind`.

The models come from a registry, so installed packages can add some. They are looked up when a configuration
is read, not when this package is imported: the modules that define them import their base from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from leeway.config.base import Section
from leeway.registry import Registry


class HasSettings(Protocol):
    """An entry of a registry with a model of its section. The model's `key` is a Literal of its own name."""

    @property
    def settings(self) -> type[Section]: ...


E = TypeVar("E", bound=HasSettings)


class Choice:
    """Annotation of a section: its model is the one registered under the value of `key`.

    task: Annotated[TaskConfig, Choice("kind", "reasoning_gym", find_kinds)]

    `default`: the value where `key` is not given. `registry`: called when a configuration is read.
    Errors, dumps and the JSON schema are those of the chosen model.
    """

    def __init__(self, key: str, default: str, registry: Callable[[], Registry[E]]) -> None:
        self.key, self.default, self.registry = key, default, registry

    def model(self, data: Any) -> type[Section] | None:
        """The model that fits a section's plain values; None when they name none."""
        name = data.get(self.key, self.default) if isinstance(data, Mapping) else None
        registry = self.registry()
        return registry[name].settings if isinstance(name, str) and name in registry else None

    def __get_pydantic_core_schema__(
        self, base: type[Section], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def validate(value: Any) -> Section:
            if isinstance(value, base):
                return value
            if not isinstance(value, Mapping):
                return base.model_validate(value)  # which says what a section is
            model = self.model(value)
            if model is None:
                raise self._unknown(base, value[self.key])
            return model.model_validate(dict(value))

        return core_schema.no_info_plain_validator_function(validate)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        options = []
        for name, entry in self.registry().items():
            option = handler(entry.settings.__pydantic_core_schema__)
            if name != self.default:  # without the key, a section is one of the default's
                properties = handler.resolve_ref_schema(option)
                properties["required"] = [self.key, *properties.get("required", [])]
            options.append(option)
        return {"oneOf": options}

    def _unknown(self, base: type[Section], name: Any) -> ValidationError:
        registry = self.registry()
        text = registry.unknown(name) if isinstance(name, str) else f"expected one of {', '.join(registry)}"
        error = PydanticCustomError("value_error", "{text}", {"text": text})
        details = InitErrorDetails(type=error, loc=(self.key,), input=name)
        return ValidationError.from_exception_data(base.__name__, [details])


def choice_of(metadata: list[Any]) -> Choice | None:
    """The Choice among the annotations of a field (`FieldInfo.metadata`)."""
    return next((item for item in metadata if isinstance(item, Choice)), None)
