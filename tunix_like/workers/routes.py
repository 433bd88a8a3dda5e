"""The HTTP routes at which agents send their requests to the policy."""

MODEL = "policy"
"""Name of the model in answers. Requests may name any model."""

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
ROUTES = (CHAT, RESPONSES, MESSAGES, COUNT)

LOCAL = "127.0.0.1"
"""The address at which they are served: that of this machine alone."""
