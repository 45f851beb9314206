// Profiles: what comes back, and every way in which a file can be the wrong one.
#include "cpp/cache/profile.h"

#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace flashnext::cache {
namespace {

namespace fs = std::filesystem;

class ProfileFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("profile_" + std::to_string(::getpid()) + "_" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(folder_);
    path_ = (folder_ / "uses.profile").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  // The note for loading with the shape and fingerprint that was saved, unless said otherwise.
  std::string note(std::uint64_t fingerprint = 77, std::int32_t layers = 2,
                   std::int32_t experts = 3) const {
    const Profile p = load_profile(path_, fingerprint, layers, experts);
    EXPECT_EQ(p.uses.empty(), !p.note.empty());
    if (!p.note.empty()) {
      EXPECT_NE(p.note.find(path_), std::string::npos) << p.note;
      EXPECT_NE(p.note.find("delete the file"), std::string::npos) << p.note;
    }
    return p.note;
  }
  void expect_note(const std::string& words) const {
    const std::string found = note();
    EXPECT_NE(found.find(words), std::string::npos) << found;
  }

  const std::vector<std::uint64_t> uses_ = {1, 0, 3, ~std::uint64_t{0}, 5, 1ull << 40};
  fs::path folder_;
  std::string path_;
};

TEST_F(ProfileFile, ComesBack) {
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  const Profile p = load_profile(path_, 77, 2, 3);
  EXPECT_EQ(p.uses, uses_);
  EXPECT_EQ(p.note, "");
  // Nothing else is left beside it, and others may read it.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0644u);
  EXPECT_EQ(read().size(), 8u + 16 + 8 + 6 * 8 + 8);
  EXPECT_EQ(read().substr(0, 8), "FNPROFIL");
}

TEST_F(ProfileFile, IsReplacedAsAWhole) {
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  const std::vector<std::uint64_t> more(6, 9);
  ASSERT_EQ(save_profile(path_, 77, 2, 3, more), "");
  EXPECT_EQ(load_profile(path_, 77, 2, 3).uses, more);
}

TEST_F(ProfileFile, ThatIsNotThereIsNothingToReport) {
  const Profile p = load_profile(path_, 77, 2, 3);
  EXPECT_TRUE(p.uses.empty());
  EXPECT_EQ(p.note, "");
}

// Of a session with the MTP head, read by one without it.
TEST_F(ProfileFile, MayHoldMoreLayersThanAreAskedFor) {
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  const Profile p = load_profile(path_, 77, 1, 3);
  EXPECT_EQ(p.note, "");
  EXPECT_EQ(p.uses, std::vector<std::uint64_t>(uses_.begin(), uses_.begin() + 3));
  EXPECT_EQ(p.rest, std::vector<std::uint64_t>(uses_.begin() + 3, uses_.end()));
  EXPECT_TRUE(load_profile(path_, 77, 2, 3).rest.empty());
}

TEST_F(ProfileFile, OfAnotherCheckpointOrShape) {
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  EXPECT_NE(note(78).find("another checkpoint"), std::string::npos);
  EXPECT_NE(note(77, 3, 2).find("2 layers of 3 experts"), std::string::npos);
  EXPECT_NE(note(77, 2, 4).find("2 layers of 4 experts"), std::string::npos);
}

TEST_F(ProfileFile, EveryDamagedByteIsNoticed) {
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  const std::string good = read();
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    write(bad);
    EXPECT_NE(note(), "") << "byte " << i;
  }
  for (std::size_t n = 0; n < good.size(); ++n) {
    write(good.substr(0, n));
    EXPECT_NE(note(), "") << n << " bytes";
  }
  write(good + "x");
  EXPECT_NE(note(), "");
  write(good);
  EXPECT_EQ(note(), "");
}

TEST_F(ProfileFile, SaysWhatIsWrong) {
  write("");
  expect_note("empty");
  write("{\"json\": 1}");
  expect_note("not a profile");
  ASSERT_EQ(save_profile(path_, 77, 2, 3, uses_), "");
  std::string bytes = read();
  write(bytes.substr(0, 70));
  expect_note("70 bytes instead of 88");
  bytes[40] = 'x';
  write(bytes);
  expect_note("checksum");
  bytes[8] = 2;
  write(bytes);
  expect_note("version is 2");
  fs::remove(path_);
  fs::create_directory(path_);
  expect_note("not a file");
}

TEST_F(ProfileFile, ThatCannotBeWrittenIsAMessage) {
  const std::string nowhere = (folder_ / "missing" / "uses.profile").string();
  const std::string message = save_profile(nowhere, 77, 2, 3, uses_);
  EXPECT_NE(message.find(nowhere), std::string::npos);
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
  fs::create_directory(path_);
  std::ofstream(fs::path(path_) / "full") << "x";
  EXPECT_NE(save_profile(path_, 77, 2, 3, uses_), "");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace flashnext::cache
