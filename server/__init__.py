"""The contract with clients: OpenAI protocol, streaming, chat templates, auth, errors, metrics, the command line."""
