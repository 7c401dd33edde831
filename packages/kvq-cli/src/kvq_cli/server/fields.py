"""Kinds of request fields that OpenAI's protocol needs and pydantic does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Body(BaseModel):
    """A JSON object that holds what its class names, in the right types, and nothing else."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_stranger(cls, data: Any) -> Any:
        # the first is enough to refuse it: an error each takes a thousand times their bytes
        if not isinstance(data, dict):
            return data
        known = {name: data[name] for name in data.keys() & cls.model_fields.keys()}
        stranger = next((name for name in data if name not in known), None)
        return known if stranger is None else {**known, stranger: data[stranger]}


Item = TypeVar("Item")
# A list of which the first wrong item is told and no other is looked at, for the same reason.
List = Annotated[list[Item], Field(fail_fast=True)]


def _encodable(text: str) -> str:
    # JSON can escape half of a surrogate pair; no tokenizer and no answer can carry it
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "string_unicode",
            "must be Unicode text, it has a lone surrogate at character {at}",
            {"at": error.start},
        ) from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Ignored = Annotated[Any, Field(description="accepted and ignored")]


@dataclass(frozen=True, eq=False)  # typing caches annotations by equality, and 0 == False
class Only:
    """Annotates a parameter whose effect the server lacks: absent, null or a value without effect.

    Anything else is refused, so that no request is answered as if the parameter had been obeyed.
    """

    neutral: tuple[Any, ...]

    def __init__(self, *neutral: Any) -> None:
        object.__setattr__(self, "neutral", neutral)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [None, *self.neutral], "description": "not supported"}

    def _check(self, value: Any) -> Any:
        # False is no 0 here, and 0.0 is
        alike = (n for n in self.neutral if isinstance(n, bool) == isinstance(value, bool))
        if value is None or value in alike:
            return value
        neutral = " or ".join(map(repr, self.neutral))
        raise PydanticCustomError(
            "unsupported_parameter",
            "is not supported by this server; leave it out{instead}",
            {"instead": f" or give {neutral}" if neutral else ""},
        )


@dataclass(frozen=True)
class Expected:
    """Annotates a union: one error in plain words instead of one for every member."""

    words: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValueError as error:
            raise PydanticCustomError("shape", "must be {words}", {"words": self.words}) from error
