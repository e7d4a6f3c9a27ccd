"""The schema of the profiles in memories.db."""

from pydantic import BaseModel


class Home(BaseModel):
    city: str = ""


class Person(BaseModel):
    name: str = ""
    home: Home = Home()
    likes: list[str] = []
