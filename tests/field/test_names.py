"""Names of files: the published forms of recorders, and the recording that a table's name means."""

import pytest

from loaders.audio.recordings import recorders
from loaders.audio.recordings.annotations import shown
from loaders.audio.recordings.find import Names

# Name -> date, time, site, latitude and longitude, as its recorder's manual reads it.
RECORDERS = {
    "20230501_053000.WAV": "2023-05-01 05:30:00",  # AudioMoth
    "20230501_053000T.WAV": "2023-05-01 05:30:00",
    "24F319055FDF28FD_20220601_053000.WAV": "2022-06-01 05:30:00 24F319055FDF28FD",
    "5E90A4D4.WAV": "2020-04-10 16:54:44+00:00",
    "40000000.WAV": "",  # might be a number
    "SMM01_20160506_175304.wav": "2016-05-06 17:53:04 SMM01",  # Song Meter
    "SMM01_20160506$175304.wav": "2016-05-06 17:53:04 SMM01",
    "SMM01_20160506+175304.wav": "2016-05-06 17:53:04 SMM01",
    "SM3_0+1_20160506_175304.wav": "2016-05-06 17:53:04 SM3",
    "SM4_0+1_20160506$175304_000.wav": "2016-05-06 17:53:04 SM4",
    # Frontier Labs
    "S20240815T095156.839419+1000_E20240815T100151.840193+1000_-31.51+143.13.wav": (
        "2024-08-15 09:51:56+10:00 -31.51 143.13"
    ),
    "S20240815T095156+1000_E20240815T100151+1000.wav": "2024-08-15 09:51:56+10:00",
    "20190401T120000+1000_REC.flac": "2019-04-01 12:00:00+10:00",  # BAR-LT
    "20190401T120000+1000_REC [-27.3819 152.8735].flac": (
        "2019-04-01 12:00:00+10:00 -27.3819 152.8735"
    ),
    "SWIFT01_20190526_053000Z.flac": "2019-05-26 05:30:00+00:00 SWIFT01",
    "SWIFT01_20190526_053000-0400.flac": "2019-05-26 05:30:00-04:00 SWIFT01",
    "AM1-2015-06-01_08-30.flac": "2015-06-01 08:30:00 AM1",  # Arbimon
    "NORTH-2_20230501_053000.wav": "2023-05-01 05:30:00 NORTH-2",
    "S_20230501_053000.wav": "2023-05-01 05:30:00 S",
    "2023-05-01T05-30-00Z.flac": "2023-05-01 05:30:00+00:00",
    "2023-05-01 05.30.00.wav": "2023-05-01 05:30:00",
    "20230501053000.wav": "2023-05-01 05:30:00",
    "2021_07_12_17-34-07.wav": "2021-07-12 17:34:07",  # SDRSharp
    # a begin and an end
    "20240501_053000_20240501_063000.wav": "2024-05-01 05:30:00",
    "MILL_20240501_053000_20240501_063000.wav": "2024-05-01 05:30:00 MILL",
    "MILL-2_20240501T053000Z_20240501T063000Z.flac": "2024-05-01 05:30:00+00:00 MILL-2",
    "2024-05-01_05-30-00_2024-05-01_06-30-00.wav": "2024-05-01 05:30:00",
    "20240501T053000+0200-20240501T063000+0200.wav": "2024-05-01 05:30:00+02:00",
    "20240501_235900-20240502_005900_MILL.wav": "2024-05-01 23:59:00",
    "20240501053000_20240501063000.wav": "2024-05-01 05:30:00",
    "20240501_20240502.wav": "2024-05-01",
    "1678036994.210324221550.wav": "2021-03-24 22:15:50 1678036994",  # SoundTrap
    "6075.220210084905.wav": "2022-02-10 08:49:05 6075",
    "SanctSound_SB01_01_1678032935_181112190000.wav": (
        "2018-11-12 19:00:00 SanctSound_SB01_01_1678032935"
    ),
    "SanctSound_CI01_01_671379494_181031200003Z.flac": (
        "2018-10-31 20:00:03+00:00 SanctSound_CI01_01_671379494"
    ),
    "1678036994.210324221550_2.wav": "2021-03-24 22:15:50 1678036994",
    "1678036994.2103242215501.wav": "",
    "7414.221210142233.df20.x.wav": "2022-12-10 14:22:33 7414",
    "6075.221310084905.wav": "",  # a year has no 13th month
    "Hawaii_K_14_121216_190000.df20.x.flac": "2012-12-16 19:00:00 Hawaii_K_14",  # HARP
    "SOCAL26H_d01_081102_073000.x.wav": "2008-11-02 07:30:00 SOCAL26H_d01",
    "WAT_NC_03_170716_180000_df100.x.wav": "2017-07-16 18:00:00 WAT_NC_03",
    "Cross_A_02_060114_200928.d20.x.flac": "2006-01-14 20:09:28 Cross_A_02",
    "Hawaii_K_14_121216_190000.df20.x.0218.flac": "",  # a part that begins later
    "WISPR_241021_004352.wav": "2024-10-21 00:43:52",  # WISPR
    "sg639_WISPR_241021_004352.flac": "2024-10-21 00:43:52 sg639",
    "MILL_010524_053000.wav": "",  # of 2001, or of May 2024
    "rec_20230501.wav": "2023-05-01",
    "20230231_053000.wav": "",  # February has no 31st
    "20239901_053000.wav": "",
    "XC123456.mp3": "",
    "XC20190101.mp3": "",  # a number, not a date
    "12345678.wav": "",
}


@pytest.mark.parametrize("name, values", RECORDERS.items())
def test_names_of_recorders(name, values):
    found = recorders.from_name(name)
    assert [
        found[key] for key in ("date", "time", "site", "latitude", "longitude") if key in found
    ] == values.split()


def test_a_header_that_contradicts_its_name():
    at = {"date": "2023-05-01", "time": "05:30:00"}
    assert not recorders.differ(at, {"date": "2023-05-01", "time": "05:30:00+02:00"}), "both local"
    assert not recorders.differ(at, {"date": "2023-05-01", "time": "07:30:00+02:00"}), (
        "the name is in UTC"
    )
    assert recorders.differ(at, {"date": "2023-05-01", "time": "08:30:00+02:00"})
    assert recorders.differ(at, {"date": "2023-05-02", "time": "05:30:00"})
    assert not recorders.differ(
        {"date": "2023-05-01"}, {"date": "2023-05-02", "time": "05:30:00"}
    ), "a name without a time"


def test_the_longest_part_of_a_path_that_agrees_decides():
    names = Names(["A/x.wav", "B/x.wav", "y.flac", "B/deep/z.wav"])
    assert names.match("A/x.wav") == (["A/x.wav"], ["B/x.wav"])
    assert names.match("C:\\data\\B\\x.WAV") == (["B/x.wav"], ["A/x.wav"])
    assert names.match("C/x.wav") == (
        [],
        ["A/x.wav", "B/x.wav"],
    ), "another folder is another recording"
    assert names.match("x") == (["A/x.wav", "B/x.wav"], [])
    assert names.match("/elsewhere/y.wav") == (["y.flac"], []), "no folder of it contradicts"
    assert names.match("A/deep/z.wav") == ([], ["B/deep/z.wav"])
    assert names.match("/data/B/deep/z.wav") == (["B/deep/z.wav"], [])
    assert names.match("w.wav") == names.match("") == ([], [])
    assert Names(["Wu\u0308rger.wav"]).match("W\u00fcrger.wav")[0] == ["Wu\u0308rger.wav"]


def test_names_that_differ_look_different():
    texts = ["W\u00fcrger", "Wu\u0308rger", "a\u00a0b", "a b", "a\u200bb", "ab"]
    assert len({shown(text) for text in texts}) == len(texts)
    assert shown("W\u00fcrger 鶯") == "W\u00fcrger 鶯" and shown("a\tb\x1b") == "a\\tb\\x1b"
