"""HTTP in front of the engine: OpenAI's API, files and fine-tuning jobs; the engine runs in a
process of its own.
"""
