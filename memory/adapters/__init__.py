"""Chat memory for people who come from LangChain4j, Spring AI or RunnableWithMessageHistory."""

from perdure.memory.adapters.langchain import ThreadMessageHistory as ThreadMessageHistory
from perdure.memory.adapters.langchain4j import ChatMemoryStore as ChatMemoryStore
from perdure.memory.adapters.langchain4j import (
    CheckpointerChatMemoryStore as CheckpointerChatMemoryStore,
)
from perdure.memory.adapters.langchain4j import InMemoryChatMemoryStore as InMemoryChatMemoryStore
from perdure.memory.adapters.langchain4j import MessageWindowChatMemory as MessageWindowChatMemory
from perdure.memory.adapters.langchain4j import TokenWindowChatMemory as TokenWindowChatMemory
from perdure.memory.adapters.spring import ChatMemoryRepository as ChatMemoryRepository
from perdure.memory.adapters.spring import (
    CheckpointerChatMemoryRepository as CheckpointerChatMemoryRepository,
)
from perdure.memory.adapters.spring import (
    InMemoryChatMemoryRepository as InMemoryChatMemoryRepository,
)
from perdure.memory.adapters.spring import MessageChatMemory as MessageChatMemory
from perdure.memory.adapters.spring import MessageChatMemoryAdvisor as MessageChatMemoryAdvisor
from perdure.memory.adapters.spring import (
    VectorStoreChatMemoryAdvisor as VectorStoreChatMemoryAdvisor,
)
