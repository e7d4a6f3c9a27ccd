"""Chat memory for people who come from LangChain4j, Spring AI or RunnableWithMessageHistory."""

from perdure.memory.adapters.advisors import MessageChatMemoryAdvisor, PromptChatMemoryAdvisor
from perdure.memory.adapters.history import ThreadMessageHistory
from perdure.memory.adapters.langchain4j import MessageWindowChatMemory, TokenWindowChatMemory
from perdure.memory.adapters.recalling import VectorStoreChatMemoryAdvisor
from perdure.memory.adapters.spring import (
    ChatMemory,
    ChatMemoryRepository,
    CheckpointerChatMemoryRepository,
    InMemoryChatMemoryRepository,
    MessageChatMemory,
)
from perdure.memory.adapters.stores import (
    ChatMemoryStore,
    CheckpointerChatMemoryStore,
    InMemoryChatMemoryStore,
)
from perdure.memory.adapters.thread import ThreadMessages

__all__ = [
    "ChatMemory",
    "ChatMemoryRepository",
    "ChatMemoryStore",
    "CheckpointerChatMemoryRepository",
    "CheckpointerChatMemoryStore",
    "InMemoryChatMemoryRepository",
    "InMemoryChatMemoryStore",
    "MessageChatMemory",
    "MessageChatMemoryAdvisor",
    "MessageWindowChatMemory",
    "PromptChatMemoryAdvisor",
    "ThreadMessageHistory",
    "ThreadMessages",
    "TokenWindowChatMemory",
    "VectorStoreChatMemoryAdvisor",
]
