import pytest

# they assert for many tests, and are to say what they found
pytest.register_assert_rewrite(
    "tests.helpers", "tests.system.runs", "tests.system.jobs_on_slurm", "tests.system.jobs_on_hosts"
)
