"""These need the extra `federated`: `make test-federated` sets it up and runs them."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["*.py"]
