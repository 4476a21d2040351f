"""Properties are judged by what they find, never by how long a busy machine takes for one example."""

from hypothesis import settings

settings.register_profile("plan", deadline=None, database=None)
settings.load_profile("plan")
