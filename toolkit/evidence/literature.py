"""The papers that notebooks belong to, in the report's order: what to call each and how to cite it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """One paper; `name` is that of its system. Entries without a title are not papers, and cite none."""

    name: str
    title: str = ""
    authors: str = ""

    @property
    def reference(self) -> str | None:
        """Authors and title as one line."""
        return f"{self.authors}: {self.title}".removeprefix(": ") if self.title else None


PAPERS = {
    "endor": Paper(
        "ENDOR",
        "ENDOR: Hardware-Friendly Sparse Format for Offloaded LLM Inference",
        "Donghyeon Joo, Ramyad Hadidi, Soheil Feizi, Bahar Asgari",
    ),
    "flash": Paper(
        "LLM in a flash",
        "LLM in a flash: Efficient Large Language Model Inference with Limited Memory",
        "Keivan Alizadeh, Iman Mirzadeh, Dmitry Belenko, S. Karen Khatamifard, Minsik Cho, Carlo C Del Mundo, "
        "Mohammad Rastegari, Mehrdad Farajtabar",
    ),
    "spqr": Paper(
        "SpQR's inference kernel",
        "An Efficient Inference Kernel for SpQR (Master's thesis, Graz University of Technology, 2025)",
        "Elvir Crncevic",
    ),
    "hermes": Paper(
        "Hermes",
        "Make LLM Inference Affordable to Everyone: Augmenting GPU Memory with NDP-DIMM",
        "Lian Liu, Shixin Zhao, Bing Li, Haimeng Ren, Zhaohui Xu, Mengdi Wang, Xiaowei Li, Yinhe Han, Ying Wang",
    ),
    "corm": Paper(
        "CORM",
        "CORM: Coarse-to-fine-grained Offloading for SMoE LLM Inference on Consumer-grade GPU",
        "Anonymous ACL submission",
    ),
    "beyond": Paper("Beyond the papers"),
}
