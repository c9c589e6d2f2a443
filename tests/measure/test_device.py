"""Instruments: calls become arms. On the host here; graphs where there is a GPU."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from kserve.measure.device import GraphInstrument, HostInstrument, instrument_for
from kserve.measure.timing import Rule, measure


def test_an_arm_gives_the_seconds_of_one_call():
    prepared = HostInstrument().prepare({"slow": lambda: time.sleep(0.004)})
    assert 0.004 <= prepared.arms["slow"]() < 0.04
    assert (prepared.instrument, prepared.failed) == ("host", {})


def test_short_calls_share_an_interval_of_one_width():
    prepared = HostInstrument().prepare({"short": lambda: None, "long": lambda: time.sleep(0.002)})
    assert prepared.width == 128
    assert prepared.arms["short"]() < 1e-4


def test_the_first_call_is_told_apart():
    waits = itertools.chain([0.05], itertools.repeat(0.0))
    prepared = HostInstrument().prepare({"cold": lambda: time.sleep(next(waits))})
    assert prepared.first_s["cold"] >= 0.05
    assert prepared.arms["cold"]() < 0.05


def test_a_call_that_fails_has_no_arm_and_a_reason():
    def broken() -> None:
        raise ValueError("no such shape")

    prepared = HostInstrument().prepare({"broken": broken, "sound": lambda: None})
    assert list(prepared.arms) == ["sound"]
    assert prepared.failed == {"broken": "ValueError: no such shape"}


def test_no_calls_no_arms():
    assert HostInstrument().prepare({}).arms == {}


def test_the_host_has_the_hosts_instrument():
    assert isinstance(instrument_for("cpu"), HostInstrument)


@pytest.fixture
def tensors(gpu: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(1 << 24, device=gpu)
    return source, torch.empty_like(source)


@pytest.mark.gpu
def test_a_planted_ratio_is_found_on_the_device(tensors):
    source, target = tensors
    half = source.numel() // 2
    calls = {"half": lambda: target[:half].copy_(source[:half]), "whole": lambda: target.copy_(source)}
    prepared = GraphInstrument().prepare(calls)
    assert (prepared.instrument, prepared.failed) == ("graph", {})
    found = measure(prepared.arms, rule=Rule(soft_s=5.0))
    assert found.ratios["whole"].value == pytest.approx(2.0, rel=0.15)


@pytest.mark.gpu
def test_a_short_kernel_is_captured_often_enough(tensors):
    source, _ = tensors
    prepared = GraphInstrument().prepare({"short": source[:1024].zero_})
    assert prepared.width == 128
    assert prepared.arms["short"]() < 5e-6


@pytest.mark.gpu
def test_a_call_that_launches_nothing_is_no_arm(tensors):
    prepared = GraphInstrument().prepare({"idle": lambda: None, "sound": tensors[1].zero_})
    assert list(prepared.arms) == ["sound"]
    assert "launched nothing" in prepared.failed["idle"]


@pytest.mark.gpu
def test_a_call_that_waits_cannot_be_captured(tensors):
    prepared = GraphInstrument().prepare({"waits": lambda: tensors[0].sum().item(), "sound": tensors[1].zero_})
    assert list(prepared.arms) == ["sound"]
    assert "captured" in prepared.failed["waits"]


@pytest.mark.gpu
def test_an_emptied_cache_costs_time(gpu):
    source = torch.randn(1 << 21, device=gpu)  # 8 MB: it lies in the last-level cache when nobody empties it
    target = torch.empty_like(source)
    seconds = []
    for flush in (False, True):
        prepared = instrument_for("cuda", flush=flush).prepare({"copy": lambda: target.copy_(source)})
        seconds.append(measure(prepared.arms, rule=Rule(soft_s=2.0)).medians["copy"].value)
    assert seconds[1] > seconds[0]
