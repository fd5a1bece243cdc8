import pytest

pytest.register_assert_rewrite("tests.memory.machines", "tests.memory.model")
