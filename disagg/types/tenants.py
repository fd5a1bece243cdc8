"""What a tenant may be called, in files of keys, in tokens and in settings."""

from __future__ import annotations

import re
from typing import Final

MAX_TENANT_CHARS: Final = 128
TENANT_SIGNS: Final = "._@:/+=-"  # beside letters and digits
TENANT: Final = re.compile(rf"[A-Za-z0-9._@:/+=-]{{1,{MAX_TENANT_CHARS}}}")
