"""Text and tokens: the tokenizer, chat templates, and texts of others in which a control token is only text.

Start with `tokenizer.py`: `Tokenizer` reads the tokenizer of a model, encodes texts and renders chats. It calls
`chat_templates.py` to render, `conversations.py` to check messages, and `untrusted.py` so that no text of a data row
becomes a control token. `tool_calls.py` reads the tool calls that a model wrote.
"""
