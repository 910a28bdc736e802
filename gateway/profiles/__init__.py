"""What is particular to each kind of engine, one small module a kind, chosen by ``kind``."""

from __future__ import annotations

from gateway.profiles.base import AS_IT_IS, Ask, AskUsage, Load, Looks, Profile, Rewrite, Work
from gateway.profiles.llamacpp import LlamaCpp
from gateway.profiles.ollama import Ollama
from gateway.profiles.openai import OpenAI
from gateway.profiles.sglang import Sglang
from gateway.profiles.vllm import Vllm

PROFILES: dict[str, Profile] = {
    profile.kind: profile for profile in (Vllm(), Sglang(), LlamaCpp(), Ollama(), OpenAI())
}

__all__ = ["AS_IT_IS", "PROFILES", "Ask", "AskUsage", "Load", "Looks", "Profile", "Rewrite", "Work"]
