"""starVLA's action heads on Qwen3-VL: QwenPI_v3, QwenPI, QwenGR00T, QwenOFT, QwenFast (github.com/starVLA/starVLA)."""
