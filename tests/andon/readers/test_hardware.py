"""What a node says of its devices, read to the conclusion that is right."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.agent.watch_gpus import changes
from andon.diagnose import devices
from andon.readers.gpu_counters import FIELDS, Gpu, read_csv, read_dcgm, read_query
from andon.readers.kernel_log import KernelLog, KernelMemory, address
from tests.andon.readers.test_training_log import numbers_in, on_the_wire

CASES = Path(__file__).resolve().parents[2] / "cases" / "hardware"
KERNEL = (CASES / "kernel.log").read_text().splitlines()


def kernel(lines):
    log = KernelLog()
    return [event for line in lines for event in log.feed(line)]


class TestKernelLog:
    def test_every_spelling_of_an_xid_is_read_by_its_number_and_address(self):
        found = [
            (one["data"]["xid"], one["data"]["pci"])
            for one in kernel(KERNEL)
            if one["type"] == "hardware.xid"
        ]
        assert found == [
            (119, "0000:8a:00"),
            (14, "0000:03:00"),
            (48, "000d:00:00"),
            (79, "0000:5d:00"),
            (79, "0000:18:00"),
            (79, "0000:29:00"),
            (149, "0009:01:00"),
            (154, "0009:01:00"),
        ]

    def test_154_is_no_fault_and_says_what_the_driver_wants(self):
        (event,) = [one for one in kernel(KERNEL) if one["data"].get("xid") == 154]
        assert event["data"]["action"] == "Drain and Reset"
        assert devices.xid(event["data"])[1] == "follows"

    def test_a_switch_is_no_gpu_and_a_non_fatal_error_no_fault(self):
        switches = [one for one in kernel(KERNEL) if "sxid" in one["data"]]
        assert [(one["type"], one["data"]["sxid"], one["data"].get("link")) for one in switches] == [
            ("node.state", 12028, 32),
            ("hardware.link", 20034, 30),
        ]

    def test_a_lost_link_and_a_process_killed_for_memory_are_told(self):
        link, killed = kernel(KERNEL)[-2:]
        assert (link["type"], link["data"]["device"]) == ("hardware.link", "eth0")
        assert (killed["type"], killed["data"]["pid"]) == ("process.error", 2002)

    def test_a_record_of_the_kernels_buffer_happened_when_its_clock_says(self):
        log = KernelLog(KernelMemory(boot_ns=10**18))
        (event,) = log.feed("4,1811,5000000,-;NVRM: Xid (PCI:0000:9b:00): 31, pid=1, name=x, MMU Fault")
        assert event["time"] == 10**18 + 5 * 10**9

    @pytest.mark.parametrize(
        "line", ["NVRM: Xid (invalid-bdf): 79, x", "[1.0] NVRM: GPU is fine", "SXid (PCI"]
    )
    def test_what_is_none_is_left_alone(self, line):
        assert kernel([line]) == []

    @given(
        st.lists(
            st.one_of(
                st.text(max_size=200),
                st.sampled_from(KERNEL),
                st.builds(
                    lambda line, at, more: line[:at] + more + line[at:],
                    st.sampled_from(KERNEL),
                    st.integers(0, 120),
                    st.text(max_size=5),
                ),
            ),
            max_size=8,
        )
    )
    def test_whatever_comes_is_taken_by_the_server_and_no_code_is_invented(self, lines):
        events = kernel(lines)
        if events:
            assert len(on_the_wire(events)) == len(events)
        text = "\n".join(lines)
        for event in events:
            code = event["data"].get("xid")
            assert code is None or code in numbers_in(text) or "fallen off the bus" in text.lower()


@pytest.mark.parametrize(
    ("spelled", "is_"),
    [
        ("00000000:10:1C.0", "0000:10:1c"),
        ("0000:9b:00", "0000:9b:00"),
        ("9B:00", "0000:9b:00"),
        ("000D:00:00", "000d:00:00"),
    ],
)
def test_one_address_however_it_is_spelled(spelled, is_):
    assert address(spelled) == is_


def row(**cells):
    base = dict.fromkeys(FIELDS.values(), "[N/A]")
    base |= {"index": "3", "uuid": "GPU-1234", "pci": "00000000:8A:00.0", **cells}
    return ", ".join(base[name] for name in FIELDS.values())


class TestNvidiaSmi:
    def test_what_is_not_supported_is_not_zero(self):
        (gpu,) = read_csv(row(gpu_temp_c="64", power_w="611.20", throttle_reasons="0x0000000000000040"))
        assert gpu.values == {"gpu_temp_c": 64.0, "power_w": 611.2, "throttle_reasons": 64.0}
        assert (gpu.index, gpu.uuid, gpu.pci) == (3, "GPU-1234", "0000:8a:00")

    def test_errors_and_remapped_rows_of_the_long_form(self):
        first, second = read_query((CASES / "nvidia-smi-q.txt").read_text())
        assert first.pci == "0000:8a:00"
        assert first.values == {
            "ecc_sbe": 213.0,  # of the driver's life, not the aggregate as well
            "ecc_dbe": 0.0,
            "rows_remapped_correctable": 1.0,
            "rows_remapped_uncorrectable": 0.0,
            "row_remap_pending": 1.0,
            "row_remap_failure": 0.0,
        }
        assert second.pci == "000d:00:00"
        assert second.values["ecc_dbe"] == 2.0

    @given(st.text(max_size=300))
    def test_no_text_crashes_it(self, text):
        read_csv(text)
        read_query(text)
        read_query(f"GPU 00000000:8A:00.0\n{text}")
        read_dcgm(text.splitlines())


class TestDcgm:
    def test_counters_by_gpu_and_links_added_up(self):
        first, second = read_dcgm((CASES / "dcgm.prom").read_text().splitlines())
        assert (first.uuid, first.pci, first.index) == ("GPU-aaaa", "0000:8a:00", 0)
        assert first.values == {
            "gpu_temp_c": 61.0,
            "power_w": 612.402,
            "xid_last": 31.0,
            "nvlink_errors": 9.0,
        }
        assert second.xids == {94: 2}
        assert second.values["ecc_dbe"] == 1.0


class TestChanges:
    def of(self, before, now):
        told = changes(Gpu(uuid="GPU-1", **before), Gpu(uuid="GPU-1", **now))
        return [(one["type"], one["data"]) for one in told]

    def test_a_gauge_that_keeps_its_last_xid_is_no_news(self):
        assert self.of({"values": {"xid_last": 31.0}}, {"values": {"xid_last": 31.0}}) == []
        assert self.of({"values": {"xid_last": 0.0}}, {"values": {"xid_last": 79.0}}) == [
            ("hardware.xid", {"gpu_uuid": "GPU-1", "xid": 79})
        ]

    def test_only_what_grew_is_told(self):
        (told,) = self.of(
            {"values": {"ecc_dbe": 1.0, "ecc_sbe": 9.0}}, {"values": {"ecc_dbe": 3.0, "ecc_sbe": 9.0}}
        )
        assert told == ("hardware.ecc", {"gpu_uuid": "GPU-1", "uncorrected": 2})
        assert devices.ecc(told[1]) == (2, 0)
        assert self.of({"values": {"ecc_dbe": 3.0}}, {"values": {"ecc_dbe": 0.0}}) == []

    def test_a_pending_row_is_corrected_and_no_damage(self):
        (told,) = self.of({"values": {"row_remap_pending": 0.0}}, {"values": {"row_remap_pending": 1.0}})
        assert devices.ecc(told[1]) == (0, 1)
        assert not devices.is_fault(*told)

    def test_a_clock_held_back_for_heat_is_told_when_it_begins(self):
        now = {"values": {"throttle_reasons": float(0x40), "gpu_temp_c": 88.0}}
        assert self.of({"values": {"throttle_reasons": 0.0}}, now) == [
            (
                "hardware.thermal",
                {"gpu_uuid": "GPU-1", "reason": "hardware thermal slowdown", "gpu_temp_c": 88.0},
            )
        ]
        assert self.of(now, now) == []
        assert self.of({"values": {}}, {"values": {"throttle_reasons": float(0x4)}}) == []  # power cap: usual
