"""What a model is to answer when it forms memories."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field, create_model

from perdure.memory.profile.proposing import LooseOperation

_MOST: Final = 200  # entries of a list: more is a model that has lost its way


class FactChange(BaseModel):
    """One change to the memories."""

    action: Literal["insert", "update", "supersede", "delete"] = Field(
        description="insert a new memory; update one that was wrong or badly put; supersede one "
        "that was true and is no longer; delete one that is no longer to be kept"
    )
    memory: str | None = Field(
        None, description="the memory to update, supersede or delete, by its name, like m3"
    )
    text: str | None = Field(
        None, description="what the memory is to say: one fact, which can be understood alone"
    )
    about: str | None = Field(None, description="whom or what it is about, in a word or two")
    when: str | None = Field(None, description="when it happened or since when it holds, as a date")
    messages: list[int] = Field(
        default_factory=list, description="the numbers of the messages that say so"
    )


class Episode(BaseModel):
    """Something the assistant was asked to do, and how that went."""

    input: str = Field(description="what was asked, so that it can be understood alone")
    outcome: str = Field(description="what was done, and how that turned out")
    why: str = Field(description="why it turned out so, and what to do the next time")
    messages: list[int] = Field(default_factory=list, description="the numbers of its messages")


class Suggestion(BaseModel):
    """A lasting wish of the user on how the assistant should behave."""

    text: str = Field(description="the wish, as one instruction to the assistant")
    messages: list[int] = Field(
        default_factory=list, description="the numbers of the messages in which the user says so"
    )


class ProfileChange(LooseOperation):
    """An operation of a JSON Patch (RFC 6902) of the profile."""

    messages: list[int] = Field(
        default_factory=list, description="the numbers of the messages in which the user says so"
    )


class Answer(BaseModel):
    """What of the conversation is to be kept."""

    facts: list[FactChange] = Field(default_factory=list, max_length=_MOST)
    profile: list[ProfileChange] = Field(default_factory=list, max_length=_MOST)
    episodes: list[Episode] = Field(default_factory=list, max_length=_MOST)
    instructions: list[Suggestion] = Field(default_factory=list, max_length=_MOST)


def form(*, profile: bool, episodes: bool, instructions: bool) -> type[BaseModel]:
    """The form of an answer with those parts that are asked for; `Answer` takes it."""
    asked = {"facts": True, "profile": profile, "episodes": episodes, "instructions": instructions}
    fields: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in Answer.model_fields.items()
        if asked[name]
    }
    return create_model("Memories", __doc__=Answer.__doc__, **fields)


def answer_of(parsed: BaseModel) -> Answer:
    """An answer in such a form."""
    return Answer(**{name: getattr(parsed, name) for name in type(parsed).model_fields})
