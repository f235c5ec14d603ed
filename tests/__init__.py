import pytest

# they assert for many tests, and are to say what they found
pytest.register_assert_rewrite(
    "tests.helpers", "tests.infra.runs", "tests.infra.jobs_on_slurm", "tests.infra.jobs_on_hosts"
)
