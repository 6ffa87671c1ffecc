"""The controller: who computes, what exists, who is there."""
