"""Operations on tensors. Knows neither who owns a page nor any setting."""
