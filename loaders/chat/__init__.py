"""Chats of text and audio, and the codec of their audio."""
