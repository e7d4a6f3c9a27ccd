"""Chat memory for people who come from LangChain4j, Spring AI or RunnableWithMessageHistory."""

from perdure.memory.adapters.langchain import ThreadMessageHistory
from perdure.memory.adapters.langchain4j import (
    ChatMemoryStore,
    CheckpointerChatMemoryStore,
    InMemoryChatMemoryStore,
    MessageWindowChatMemory,
    TokenWindowChatMemory,
)
from perdure.memory.adapters.spring import (
    ChatMemory,
    ChatMemoryRepository,
    CheckpointerChatMemoryRepository,
    InMemoryChatMemoryRepository,
    MessageChatMemory,
    MessageChatMemoryAdvisor,
    VectorStoreChatMemoryAdvisor,
)

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
    "ThreadMessageHistory",
    "TokenWindowChatMemory",
    "VectorStoreChatMemoryAdvisor",
]
