"""Workers compute in one thread here too."""

from tests.models.conftest import quiet_single_thread

__all__ = ["quiet_single_thread"]
