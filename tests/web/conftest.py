"""What tests in a browser share: the helpers beside this file and those of the server tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "serving"))

from servers import end_of_shared_servers

__all__ = ["end_of_shared_servers"]
