"""Near-miss reuse, the part without rows: which prompt is nearly the one that came, and what of it may be reused."""

from sglang_plt.near_miss.donors import Donors
from sglang_plt.near_miss.plan import Limits, Refusal, Span, plan_spans

__all__ = ["Donors", "Limits", "Refusal", "Span", "plan_spans"]
