"""Run the slow proofs: python -m tests.proofs [PART …]."""

import sys

from tests.proofs import parts

sys.exit(parts.main())
